"""The figures that lesson 12 reads, measured anew: `OPENBLAS_CORETYPE=Haswell python tests/measure_stored.py`.

Writes pagedkv/teach/measured.json, in four digits. Takes two minutes, on a machine that does
nothing else. Afterwards `make notebooks`, and read lesson 12's sentences about them.
"""

import json
import sys
import tempfile
from pathlib import Path

from pagedkv import cli

STORED = Path(__file__).parents[1] / "pagedkv" / "teach" / "measured.json"
PEERS = "paged,paged-ungrouped,numpy-padded,numpy-sequences,torch-gqa,torch-rows,torch-sequences,torch-gather"
COMMAND = f"bench --shapes b8,c --block-sizes 1,4,8,16,32,64,128,256 --dtypes float32 --peers {PEERS} --out"


def rounded(value):
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def written(results: dict) -> str:
    """As JSON, a line for each row of figures, so that a change of some shows as a change of some."""
    parts = {name: json.dumps(value, ensure_ascii=False) for name, value in results.items()}
    for name, value in results.items():
        if isinstance(value, list) and value:
            lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value)
            parts[name] = f"[\n  {lines}\n ]"
    return "{\n" + ",\n".join(f' "{name}": {text}' for name, text in parts.items()) + "\n}\n"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        code = cli.main([*COMMAND.split(), folder])
        if code == 0:
            results = rounded(json.loads((Path(folder) / "results.json").read_text("utf-8")))
            results["machine"]["system"] = results["machine"]["system"].split("-")[0]
            STORED.write_text(written(results), "utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
