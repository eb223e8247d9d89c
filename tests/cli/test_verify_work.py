# SPDX-License-Identifier: Apache-2.0
"""What `verify` reads of a model's files, and what it asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from recall_example import RECALL

from vllm_dcp_hybrid import placement
from vllm_dcp_hybrid.cli.model_shape import UnreadableModel
from vllm_dcp_hybrid.cli.verify.model import find_model, read_model
from vllm_dcp_hybrid.cli.verify.recall import num_recalled, read_recall_task, recall_prompts
from vllm_dcp_hybrid.cli.verify.work import NUM_DECODED, Edges, make_work
from vllm_dcp_hybrid.tiny_models.architectures import TinyModel

WORDS = range(100, 900)
EDGES = Edges(effective_block=256, chunk=512, max_model_len=4096, dcp_world_size=2, interleave_size=1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(TinyModel(kind="lfm2").config()))
    return path


@pytest.fixture
def recall_model(model: Path) -> Path:
    (model / "recall.json").write_text(json.dumps(RECALL))
    return model


def test_lengths_lie_on_either_side_of_a_block_and_go_past_three() -> None:
    lengths = {len(prompt) for prompt in make_work(WORDS, EDGES).scored}
    assert {1, 2, 3, 255, 256, 257} <= lengths
    assert any(length > 3 * 256 for length in lengths)


def test_some_prompts_are_longer_than_a_chunk() -> None:
    edges = Edges(effective_block=256, chunk=2048, max_model_len=8192, dcp_world_size=2, interleave_size=1)
    assert any(len(prompt) > 2048 for prompt in make_work(WORDS, edges).scored)


def test_with_an_interleave_one_prompt_leaves_all_ranks_but_the_first_empty() -> None:
    edges = Edges(effective_block=1024, chunk=512, max_model_len=8192, dcp_world_size=4, interleave_size=16)
    lengths = {len(prompt) for prompt in make_work(WORDS, edges).scored}
    assert {16, 65} <= lengths


def test_at_least_four_unequal_requests_are_decoded_for_64_tokens_and_one_crosses_a_block() -> None:
    lengths = [len(prompt) for prompt in make_work(WORDS, EDGES).decoded]
    assert len(set(lengths)) >= 4
    assert NUM_DECODED >= 64
    assert any(length < 256 < length + NUM_DECODED for length in lengths)


def test_tails_share_a_prefix_of_more_than_two_blocks() -> None:
    work = make_work(WORDS, EDGES)
    assert len(work.prefix) > 2 * 256
    assert all(tail[: len(work.prefix)] == work.prefix for tail in work.tails)
    assert len({len(tail) for tail in work.tails}) == len(work.tails)


@pytest.mark.parametrize("max_model_len", [128, 300, 512, 1000, 4096])
def test_no_sequence_is_longer_than_the_model_takes(max_model_len: int) -> None:
    edges = Edges(effective_block=256, chunk=2048, max_model_len=max_model_len, dcp_world_size=2, interleave_size=1)
    work = make_work(WORDS, edges)
    longest = max(len(prompt) for prompt in (*work.scored, *work.decoded, *work.tails))
    assert longest + NUM_DECODED < max_model_len


def test_prompts_are_made_of_the_words_and_repeat_some_of_them() -> None:
    work = make_work(WORDS, EDGES)
    assert all(set(prompt) <= set(WORDS) for prompt in (*work.scored, *work.decoded, *work.tails))
    longest = max(work.scored, key=len)
    end = longest[-len(longest) // 8 :][-8:]
    assert any(longest[place : place + 8] == end for place in range(len(longest) - 8))


def test_equal_seeds_make_equal_prompts() -> None:
    assert make_work(WORDS, EDGES) == make_work(WORDS, EDGES)
    assert make_work(WORDS, EDGES, seed=1) != make_work(WORDS, EDGES)


def test_the_probe_exchanges_tokens_of_the_last_rank_in_the_first_half() -> None:
    probe = make_work(WORDS, EDGES).probe
    changed = [place for place, (a, b) in enumerate(zip(probe.intact, probe.damaged, strict=True)) if a != b]
    assert changed
    assert {placement.owner(place, 2, 1) for place in changed} == {1}
    assert max(changed) < probe.first_scored


def test_words_leave_out_special_tokens(model: Path) -> None:
    (model / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 500}]}))
    (model / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"501": {}}}))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "image_token_id": 502, "eos_token_id": [503]}))
    words = read_model(str(model), {}).words
    assert not {500, 501, 502, 503} & set(words)
    assert {499, 504} <= set(words)
    assert 0 not in words
    assert config["vocab_size"] - 1 not in words


def test_downloaded_models_are_found_by_name(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "home" / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    model.rename(repository / "snapshots" / "abc")
    assert find_model("some/model", {"HF_HOME": str(tmp_path / "home")}).name == "abc"


def test_unknown_models_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnreadableModel, match=r"nobody/nothing is neither a directory .* download it first"):
        find_model("nobody/nothing", {"HF_HOME": str(tmp_path)})


def test_models_without_a_vocabulary_are_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["vocab_size"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnreadableModel, match="vocab_size"):
        read_model(str(model), {})


def test_most_models_have_no_recall_task(model: Path) -> None:
    assert read_recall_task(model) is None


def test_recall_prompts_hold_their_answers(recall_model: Path) -> None:
    task = read_recall_task(recall_model)
    assert task is not None
    prompts = recall_prompts(task, 20, max_length=4096)
    for prompt in prompts:
        assert prompt.tokens[-4] == 4
        assert prompt.tokens[-1] == 5
        key = prompt.tokens[-3:-1]
        facts = [place for place in range(len(prompt.tokens)) if prompt.tokens[place : place + 4] == [2, *key, 3]]
        assert len(facts) == 1
        assert prompt.answer == [*prompt.tokens[facts[0] + 4 : facts[0] + 7], 1]
    lengths = [len(prompt.tokens) for prompt in prompts]
    assert lengths[0] == 64
    assert lengths[-1] == 2048 - 4


def test_an_answer_counts_if_all_its_tokens_are_right(recall_model: Path) -> None:
    task = read_recall_task(recall_model)
    assert task is not None
    prompts = recall_prompts(task, 3, max_length=512)
    answers = [prompt.answer for prompt in prompts]
    assert num_recalled(prompts, answers) == 3
    assert num_recalled(prompts, [[*answers[0][:-1], 0], answers[1], [*answers[2], 9]]) == 2


@pytest.mark.parametrize("change", [{"format": 2}, {"words": 7}, {"fact": None}])
def test_recall_files_of_another_format_are_refused(recall_model: Path, change: dict[str, object]) -> None:
    (recall_model / "recall.json").write_text(json.dumps({**RECALL, **change}))
    with pytest.raises(UnreadableModel, match=r"recall\.json"):
        read_recall_task(recall_model)
