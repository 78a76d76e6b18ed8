"""The state machines that drive BlockManager drive RedisBlockManager beside it: equal results, step by step."""

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from needs import STRESS
from pools import ManagerModel, Model, new_cache
from redis_servers import servers  # noqa: F401  a fixture
from test_prefix_states import PrefixMachine
from test_states import SequencesMachine
from twin import Twin

RUNS = {"real": 100, "fake": 20} if STRESS else {"real": 4, "fake": 1}  # walks through each machine
STEPS = 40 if STRESS else 25


class SharedModel(ManagerModel):
    """A dict from slots to tokens stands for the pages."""

    url = None

    def new_pool(self, num_blocks, block_size, **options):
        self.memory = {}
        return Twin(self.url, num_blocks, block_size, **options)


class SharedCacheModel(Model):
    """A poisoned cache whose manager is shared."""

    url = None

    def new_pool(self, num_blocks, block_size, **options):
        manager = Twin(self.url, num_blocks, block_size, **options)
        return new_cache(num_blocks, block_size, manager=manager)


class SharedSequences(SequencesMachine):
    model = SharedModel

    def teardown(self):
        super().teardown()
        for model in getattr(self, "pools", []):
            model.pool.close()


class SharedPrefixes(PrefixMachine):
    model = SharedCacheModel
    hashes = st.just(False)  # the shared index takes equal SHA-256 digests for equal texts

    def teardown(self):
        super().teardown()
        for model in getattr(self, "models", []):
            model.pool.manager.close()


@pytest.mark.parametrize("kind", ["fake", "real"])
@pytest.mark.parametrize("machine", [SharedSequences, SharedPrefixes])
def test_every_step_is_that_of_a_block_manager(machine, kind, servers):  # noqa: F811
    machine.model.url = servers(kind)
    run_state_machine_as_test(
        machine,
        settings=hypothesis.settings(
            max_examples=RUNS[kind],
            stateful_step_count=STEPS,
            deadline=None,
            phases=[hypothesis.Phase.generate],  # every step asks a server: shrinking would take minutes
        ),
    )
