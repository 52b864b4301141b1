"""Tokens: what the corpora hold, that order depends on seed and step alone, and that held-out windows never train."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builders import write_tokens
from ultrascale.data.corpora import (
    ByteCorpus,
    Corpus,
    MixtureCorpus,
    SyntheticCorpus,
    TokenFileCorpus,
    corpus,
    standard_library,
)
from ultrascale.data.order import permuted
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train.data import Batches, rows_of


def alone(text: Corpus) -> MixtureCorpus:
    return MixtureCorpus(((text, Fraction(1)),))


COUNTING = alone(ByteCorpus(np.arange(101, dtype=np.uint8)))


def first_tokens(batches: Batches, steps: range) -> list[int]:
    return [int(token) for step in steps for token in batches.train(step, slice(None))[0][:, 0]]


@given(size=st.integers(1, 300), key=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_the_permutation_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permuted(place, size, key) for place in range(size)) == list(range(size))


def test_the_permutation_shuffles() -> None:
    size = 10_000
    order = np.array([permuted(place, size, 7) for place in range(size)])
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.03  # three standard deviations of chance
    assert np.mean(np.diff(order) == 1) < 0.002


def test_targets_are_inputs_one_token_on_and_windows_tile_the_text() -> None:
    batches = Batches(COUNTING, seq=10, batch=3, seed=0)
    assert (batches.train_windows, batches.evaluation_windows) == (9, 1)
    inputs, targets = batches.train(0, [0, 2])
    assert inputs.shape == targets.shape == (2, 10)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert sorted(first_tokens(batches, range(3))) == list(range(0, 90, 10))


def test_each_epoch_has_each_window_once_in_another_order() -> None:
    batches = Batches(COUNTING, seq=2, batch=7, seed=3)
    assert batches.train_windows == 49
    first, second = first_tokens(batches, range(7)), first_tokens(batches, range(7, 14))
    assert sorted(first) == sorted(second) == list(range(0, 98, 2))
    assert first != second


def test_a_batch_may_span_two_epochs() -> None:
    batches = Batches(COUNTING, seq=10, batch=4, seed=0)
    tokens = first_tokens(batches, range(9))
    assert [sorted(tokens[at : at + 9]) for at in range(0, 36, 9)] == [list(range(0, 90, 10))] * 4


def test_order_is_a_function_of_seed_and_sample_number_alone() -> None:
    whole = first_tokens(Batches(COUNTING, seq=2, batch=8, seed=5), range(6))
    assert first_tokens(Batches(COUNTING, seq=2, batch=4, seed=5), range(12)) == whole
    assert first_tokens(Batches(COUNTING, seq=2, batch=8, seed=6), range(6)) != whole
    resumed = Batches(COUNTING, seq=2, batch=8, seed=5)
    assert torch.equal(resumed.train(4, [3])[0][0, 0], torch.tensor(whole[4 * 8 + 3]))


def test_a_ramp_reads_the_same_sequences_in_smaller_batches() -> None:
    whole = first_tokens(Batches(COUNTING, seq=2, batch=1, seed=5), range(40))
    ramp = Batches(COUNTING, seq=2, batch=8, seed=5, ramp="4:8,8:24")
    assert [len(ramp.train(step, slice(None))[0]) for step in range(5)] == [2, 2, 4, 4, 8]
    assert [ramp.losses(step) for step in range(5)] == [4, 4, 8, 8, 16]
    assert first_tokens(ramp, range(6)) == whole[:28]
    plain = Batches(COUNTING, seq=2, batch=8, seed=5)
    assert torch.equal(ramp.evaluation(1, slice(None))[0], plain.evaluation(1, slice(None))[0])


def test_held_out_windows_are_the_last_and_come_in_order() -> None:
    batches = Batches(alone(ByteCorpus(np.arange(251, dtype=np.uint8))), seq=2, batch=3, seed=0)
    assert (batches.train_windows, batches.evaluation_windows) == (123, 2)
    assert batches.evaluation(0, slice(None))[0][:, 0].tolist() == [246, 248, 246]
    assert batches.evaluation(1, [0, 2])[0][:, 0].tolist() == [248, 248]
    assert max(first_tokens(batches, range(80))) < 246


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=4, mbs=2, gas=3), Layout(dp=3, tp=2, mbs=1, gas=2)])
def test_the_ranks_share_the_rows_of_a_batch(layout: Layout) -> None:
    rows = [row for gas in range(layout.gas) for rank in range(layout.dp) for row in rows_of(layout, rank, gas)]
    assert rows == list(range(layout.dp * layout.mbs * layout.gas))


def test_rows_of_a_rank() -> None:
    assert rows_of(Layout(dp=4, mbs=2, gas=3), dp_rank=1, microbatch=2) == [18, 19]


def test_the_standard_library_is_python_text() -> None:
    standard_library.cache_clear()
    text = standard_library()
    assert text is standard_library()
    assert 2**21 < len(text) <= 16 * 2**20
    assert bytes(text).count(b"\ndef ") > 1000
    assert not text.flags.writeable


def test_synthetic_windows_are_uniform_and_repeatable() -> None:
    source = SyntheticCorpus(vocab=16, seed=1)
    tokens = source.window(3, 16_000)
    assert np.array_equal(tokens, SyntheticCorpus(16, 1).window(3, 16_000))
    assert tokens.dtype == np.int64
    assert np.all(np.abs(np.bincount(tokens, minlength=16) - 1000) < 160)  # five standard deviations
    for other in (source.window(4, 16_000), SyntheticCorpus(16, 2).window(3, 16_000)):
        assert np.mean(tokens == other) < 0.08
    assert np.array_equal(source.window(3, 5), tokens[:6])


def test_a_vocabulary_below_a_byte_is_refused() -> None:
    sentence = r"train.data is stdlib \(bytes: 256 tokens\) but model.vocab is 128: try train.data=synthetic"
    with pytest.raises(SpecError, match=sentence):
        corpus(Training(), vocab=128)
    assert isinstance(corpus(Training(data="synthetic"), vocab=128).parts[0][0], SyntheticCorpus)
    assert isinstance(corpus(Training(), vocab=256).parts[0][0], ByteCorpus)


def test_a_text_too_short_is_refused_with_a_length_that_works() -> None:
    with pytest.raises(SpecError, match=r"job.seq is 60 but .* try 32"):
        Batches(COUNTING, seq=60, batch=1, seed=0)
    assert Batches(COUNTING, seq=32, batch=1, seed=0).train_windows == 2


def stored(path: Path, first: int, count: int, every: int = 10, vocab: int = 1000) -> Path:
    """A file that counts from `first`, with a document's end after `every` tokens."""
    ends = [*range(every, count, every), count]
    write_tokens(path, range(first, first + count), ends, vocab)
    return path


def test_the_order_of_a_single_set_has_stayed() -> None:
    """Written down when there were no mixtures: runs of that time can be read on."""
    assert first_tokens(Batches(COUNTING, seq=2, batch=8, seed=5), range(2)) == [
        8,
        54,
        32,
        66,
        2,
        26,
        38,
        18,
        12,
        84,
        14,
        50,
        20,
        78,
        48,
        46,
    ]


def test_a_file_of_tokens_is_read_in_the_same_order_as_any_text(tmp_path: Path) -> None:
    path = stored(tmp_path / "a.bin", 0, 101, vocab=256)
    text = corpus(Training(data=str(path)), vocab=256)
    assert isinstance(text.parts[0][0], TokenFileCorpus)
    ours, theirs = (Batches(one, seq=10, batch=3, seed=4) for one in (text, COUNTING))
    for step in range(4):
        assert all(torch.equal(*pair) for pair in zip(ours.train(step, [0, 1, 2]), theirs.train(step, [0, 1, 2]), strict=True))


def mixed(tmp_path: Path, batch: int = 5, seed: int = 0) -> Batches:
    first, second = stored(tmp_path / "a.bin", 0, 201), stored(tmp_path / "b.bin", 500, 101)
    text = corpus(Training(data=f"{first}:0.6,{second}:0.4", seed=seed), vocab=1000)
    return Batches(text, seq=10, batch=batch, seed=seed)


def test_a_mixture_has_its_proportions_in_every_batch(tmp_path: Path) -> None:
    batches = mixed(tmp_path)
    for step in range(30):
        tokens = batches.train(step, slice(None))[0][:, 0]
        assert (int((tokens < 500).sum()), int((tokens >= 500).sum())) == (3, 2)


def test_each_set_of_a_mixture_has_its_own_epochs_and_its_own_end_held_out(tmp_path: Path) -> None:
    batches = mixed(tmp_path)
    tokens = first_tokens(batches, range(57))  # 171 samples of the first, 114 of the second: 9 epochs of 19 and 12 of 9, and 6
    first, second = ([token for token in tokens if (token >= 500) == wanted] for wanted in (False, True))
    for epoch in range(9):
        assert sorted(first[epoch * 19 : epoch * 19 + 19]) == list(range(0, 190, 10))
    for epoch in range(12):
        assert sorted(second[epoch * 9 : epoch * 9 + 9]) == list(range(500, 590, 10))
    assert set(batches.evaluation(0, slice(None))[0][:, 0].tolist()) == {190, 590}
    assert (batches.train_windows, batches.evaluation_windows) == (19 + 9, 2)


def test_the_order_of_a_mixture_is_a_function_of_seed_and_sample_number_alone(tmp_path: Path) -> None:
    whole = first_tokens(mixed(tmp_path, batch=8, seed=5), range(6))
    assert first_tokens(mixed(tmp_path, batch=4, seed=5), range(12)) == whole
    assert first_tokens(mixed(tmp_path, batch=8, seed=6), range(6)) != whole
    assert mixed(tmp_path, batch=8, seed=5).train(4, [3])[0][0, 0] == whole[4 * 8 + 3]


def test_stdlib_may_be_mixed_and_a_path_may_hold_a_comma(tmp_path: Path) -> None:
    path = stored(tmp_path / "a,b:1.bin", 0, 101)
    assert isinstance(corpus(Training(data=str(path)), vocab=1000).parts[0][0], TokenFileCorpus)
    text = corpus(Training(data=f"stdlib:3,{stored(tmp_path / 'c.bin', 0, 101)}:1"), vocab=1000)
    assert [weight for _, weight in text.parts] == [3, 1]


def test_another_set_to_evaluate_on_is_all_held_out_and_changes_no_training(tmp_path: Path) -> None:
    first, second = stored(tmp_path / "a.bin", 0, 201), stored(tmp_path / "b.bin", 500, 31)
    plain = Batches(corpus(Training(data=str(first)), 1000), seq=10, batch=4, seed=0)
    other = Batches(corpus(Training(data=str(first), eval_data=str(second)), 1000), seq=10, batch=4, seed=0)
    assert first_tokens(other, range(8)) == first_tokens(plain, range(8))
    assert other.evaluation(0, slice(None))[0][:, 0].tolist() == [500, 510, 520, 500]


def test_documents_of_a_row_are_counted_from_its_first(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_tokens(path, range(41), [3, 4, 10, 20, 41], 256)  # windows of ten begin at 0, 10, 20 and 30
    text = corpus(Training(data=str(path)), vocab=256)
    batches = Batches(text, seq=10, batch=3, seed=0)
    wanted = {0: [0, 0, 0, 1, 2, 2, 2, 2, 2, 2], 10: [0] * 10, 20: [0] * 10}
    rows = zip(batches.train(0, slice(None))[0][:, 0].tolist(), batches.documents(0, slice(None)).tolist(), strict=True)
    assert {first: documents for first, documents in rows} == wanted  # noqa: C416
    assert batches.documents(0, [0], held_out=True).tolist() == [[0] * 10]


def test_a_zero_byte_ends_a_document_of_bytes() -> None:
    text = ByteCorpus(np.frombuffer(b"ab\0c\0\0defgh", dtype=np.uint8))
    assert text.documents(0, 5).tolist() == [0, 0, 0, 1, 1]
    assert text.documents(1, 5).tolist() == [0, 1, 1, 1, 1]
