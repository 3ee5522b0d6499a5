"""Files that are kept beside a tokenizer, and broken ones."""

from __future__ import annotations

import json

import pytest

from titanlite.tokenizer.kept_files import (
    ends_of,
    from_bytes,
    kept_beside,
    name_in,
    read_kept,
    text_ends,
    to_files,
)


def test_files_of_a_folder_go_through_one_file(tmp_path):
    generation = {"eos_token_id": [7, 8], "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7, "hidden_size": 4}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x", "a": 1}))
    kept = read_kept(tmp_path)
    assert kept["config.json"] == {"eos_token_id": 7}
    assert kept["generation_config.json"] == generation
    (checkpoint := tmp_path / "step").mkdir()
    for name, content in to_files(kept).items():
        (checkpoint / name).write_bytes(content)
    assert read_kept(checkpoint) == kept
    assert kept_beside(str(tmp_path / "tokenizer.json"), of_model=True) == kept
    own = kept_beside(str(tmp_path), of_model=False)
    assert own == {"tokenizer_config.json": {"a": 1}}
    assert kept_beside("", of_model=True) == {}


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff", b"1", b"[" * 100_000])
def test_a_broken_file_is_left_out_with_a_warning(tmp_path, content, caplog):
    (tmp_path / "generation_config.json").write_bytes(content)
    assert read_kept(tmp_path) == {}
    assert "generation_config.json" in caplog.text
    assert from_bytes(content) == {}


def test_ends_and_names():
    both = {"generation_config.json": {"eos_token_id": 5}, "config.json": {"eos_token_id": [6, 7]}}
    assert ends_of(both) == [5]
    assert text_ends(both, 9) == {5, 9}
    assert ends_of({"config.json": {"eos_token_id": [6, "x", 7]}}) == [6, 7]
    assert ends_of({"generation_config.json": {}, "config.json": {"eos_token_id": None}}) == []
    kept = {"tokenizer_config.json": {"bos_token": None, "eos_token": {"content": "</s>"}}}
    assert name_in(kept, "bos_token", "<s>") == ""
    assert name_in(kept, "eos_token", "<e>") == "</s>"
    assert name_in({}, "bos_token", "<s>") == "<s>"


def test_numbers_are_kept_as_transformers_writes_them(tmp_path, caplog):
    """10^30 is the longest text of a tokenizer without one; NaN is no number of JSON."""
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert b"1000000000000000019884624838656" in to_files(read_kept(tmp_path))["huggingface.json"]
    path.write_text('{"temperature": NaN}')
    assert read_kept(tmp_path) == {}
    assert "expected a JSON object of finite numbers" in caplog.text
    assert from_bytes(b'[["eos_token_id", 5]]') == {}
