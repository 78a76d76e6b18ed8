"""Saving and loading a large pool never makes a second one; tests/measure_snapshots.py measures it at 1 GB."""

import pytest
from measure_snapshots import peaks
from needs import need_module
from saved import CONTAINERS

MIB = 128


@pytest.mark.parametrize("name", CONTAINERS)
def test_there_is_no_second_copy_of_the_pool(tmp_path, name):
    pytest.importorskip("resource", reason="peaks are measured as POSIX does")
    if name.endswith(".h5"):
        need_module("h5py", "hdf5")
    pool, saving, loading = peaks(MIB, tmp_path / name)
    assert pool > MIB
    assert saving < MIB / 2 and loading < MIB / 2
