"""What is believed of a journal with whole records missing, repeated or of another journal."""

from hypothesis import given
from hypothesis import strategies as st

from primeblocks.kvoffload.disk.records import DROP, MARK, PUT, Entry, Place, encode, replay
from tests.kvoffload.disk.small import key_of

entries_ = st.lists(
    st.one_of(
        st.builds(
            lambda n, frame: Entry(PUT, key_of(n), Place(frame, n, bytes([frame] * 16))),
            st.integers(0, 1),
            st.integers(0, 2),
        ),
        st.builds(lambda n: Entry(DROP, key_of(n)), st.integers(0, 1)),
        st.just(Entry(MARK)),
    ),
    max_size=12,
)


def states_of(entries):
    """What is there after each record; a frame has the page that was put into it last."""
    states = [{}]
    for entry in entries:
        now = {key: place for key, place in states[-1].items() if key != entry.key}
        if entry.place is not None:
            now = {key: place for key, place in now.items() if place.frame != entry.place.frame}
            now[entry.key] = entry.place
        states.append(now)
    return states


def journal_of(entries, *, first=1, generation=7):
    numbered = enumerate(entries, start=first)
    return [encode(entry, sequence=n, generation=generation) for n, entry in numbered]


def read(records, *, generation=7):
    return replay(b"start" + b"".join(records), start=5, generation=generation)


@given(entries_, st.integers(1, 1 << 40))
def test_an_intact_journal_is_its_history(entries, first):
    records = journal_of(entries, first=first)
    said = read(records)
    assert said.places == states_of(entries)[-1]
    assert [*said.places] == [*states_of(entries)[-1]]
    assert not said.damaged
    assert said.end == 5 + sum(map(len, records))
    if entries:
        assert said.sequence == first + len(entries) - 1


@given(entries_.filter(bool), st.data())
def test_where_records_are_missing_no_page_comes_back(entries, data):
    # The first is there: what came before it was cleared.
    kept = sorted({0, *data.draw(st.sets(st.integers(0, len(entries) - 1)))})
    records, states = journal_of(entries), states_of(entries)
    said = read([records[index] for index in kept])
    assert said.damaged == (len(kept) <= kept[-1])
    # The last state, and what the last mark says was on the disk, as far as nothing is missing.
    whole = 1 + max((n for n in range(said.flushed) if n not in kept), default=-1)
    allowed = {*states[kept[-1] + 1].items()}
    allowed |= {*states_of(entries[whole : said.flushed])[-1].items()}
    assert {*said.places.items()} <= allowed


@given(entries_.filter(bool), st.data())
def test_an_older_record_is_not_believed(entries, data):
    records, states = journal_of(entries), states_of(entries)
    again = data.draw(st.sampled_from(records))
    said = read([*records, again])
    assert said.damaged
    allowed = {*states[-1].items()} | {*states[said.flushed].items()}
    assert {*said.places.items()} <= allowed
    assert said.end == 5 + sum(map(len, records))


@given(entries_, entries_.filter(bool), st.integers(1, 30))
def test_records_of_another_journal_are_not_believed(entries, others, first):
    records = journal_of(entries)
    said = read([*records, *journal_of(others, first=first, generation=8)])
    assert said.damaged
    assert {*said.places.items()} <= {*states_of(entries)[-1].items()} | {
        *states_of(entries)[said.flushed].items()
    }


@given(entries_.filter(bool), st.data())
def test_a_record_that_is_cut_off_was_not_answered(entries, data):
    records = journal_of(entries)
    cut = data.draw(st.integers(0, len(records[-1]) - 1))
    said = read([*records[:-1], records[-1][:cut]])
    assert not said.damaged
    assert said.places == states_of(entries[:-1])[-1]
