"""The recorded incidents of lesson 10: they can be made again, and show what they say."""

import itertools
import json

import pytest

from pagedkv.teach import incidents


def test_a_record_can_be_made_again():
    again = incidents.record("deploy", minutes=1.5)
    assert again == incidents.recorded("deploy")[: len(again)]
    assert len(again) > 12  # past the change


def test_all_are_stored_whole():
    stored = json.loads(incidents.STORED.read_text("utf-8"))
    assert stored["columns"] == ["time", *incidents.COLUMNS]
    assert list(stored["readings"]) == list(incidents.INCIDENTS)
    assert {len(rows) for rows in stored["readings"].values()} == {37}


def test_every_cause_was_recorded_twice():
    causes = [incident.cause for incident in incidents.INCIDENTS.values()]
    assert sorted(causes) == sorted(2 * list(incidents.CAUSES))


@pytest.mark.parametrize("name", incidents.INCIDENTS)
def test_counters_fall_only_where_the_server_began_anew(name):
    appended = [reading["appends_total"] for reading in incidents.recorded(name)]
    falls = [i for i, (a, b) in enumerate(itertools.pairwise(appended)) if b < a]
    assert falls == ([12] if incidents.INCIDENTS[name].anew else [])


def test_an_unknown_incident_is_named():
    with pytest.raises(KeyError, match="'flood'"):
        incidents.recorded("flood")


def test_per_second_goes_through_resets():
    assert incidents.per_second([(0, 100), (5, 110), (10, 4), (20, 10)]) == 1.0


def test_a_summary_has_means_of_gauges_and_rates_of_counters():
    usage = dict.fromkeys(incidents.COLUMNS, 0.0)
    readings = [usage | {"time": t, "usage": t / 100, "hits_total": 3 * t} for t in (0, 10, 20, 30)]
    found = incidents.summary(readings, 0, 30)
    assert (found["usage"], found["hits"], found["clones"]) == (0.1, 3.0, 0.0)
