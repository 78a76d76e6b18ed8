"""What can go wrong between a worker and the pool that it shares."""


class CoordinatorError(RuntimeError):
    """The shared pool cannot be used as it was asked; the text names the setting to look at."""


class LeaseLost(CoordinatorError):
    """This worker's lease is over, its token stale: nothing was changed.

    Its sequences are taken back, or will be. The worker must begin again: a new RedisBlockManager gets a new token.
    """


class PoolLost(CoordinatorError):
    """The server no longer has the pool that this worker joined: it was restarted empty, or the pool was made anew.

    `snapshot` still works, so that a new RedisBlockManager can `restore` what this one held.
    """


class Unreachable(CoordinatorError, ConnectionError):
    """The server did not answer in time. Whether the last call happened is found out before the next one."""
