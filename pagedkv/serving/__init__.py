"""Many requests over one pool: who runs, who waits, who gives way (lesson 08), and what a trace would need."""

from .engine import Engine
from .request import Request, SequenceGroup
from .scheduler import Scheduler
from .simulate import Result, StepTime, simulate
from .step import Chunk, Step

__all__ = [
    "Request",
    "SequenceGroup",
    "Scheduler",
    "Step",
    "Chunk",
    "Engine",
    "simulate",
    "StepTime",
    "Result",
]
