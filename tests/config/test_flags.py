"""Command-line flags and JSON files of the trainer: names, defaults, validation and docs/flags.md."""

import json
import os
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from tests.harness.runs import ROOT
from vae.config.check_flags import CheckConfig
from vae.config.declare import base_type, coerce, is_list
from vae.config.flags import COMMON, build_parser, command_words, flags_markdown, parse_flags, trainer_options
from vae.config.options import ActionConfig, Config, all_options, build, flatten, sections
from vae.config.prepare_flags import CONFIG_OF
from vae.config.trained_vae_flags import EvaluateConfig, ExportConfig, InferConfig, parse_infer_flags
from vae.config.tune_flags import TuneConfig
from vae.system.errors import UsageError, UserError

INFER = ["--vae", "a", "--mode", "variations", "--input", "b", "--output_dir", "c"]
SWITCHES = sorted(name for name, (_, item) in all_options().items() if isinstance(item.default, bool))


def test_flags_page_is_up_to_date():
    written = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert written == flags_markdown(), "run: python -m vae.config.flags > docs/flags.md"


def test_every_switch_has_both_forms():
    for name in SWITCHES:
        assert parse_flags([f"--{name}"]) == {name: True}
        assert parse_flags([f"--no-{name}"]) == {name: False}


# What the guide types: docs/training.md and the README.
TYPED = (
    "data_path output_dir config profile resume_from image_size batch_size num_epochs accumulation_steps "
    "learning_rate weight_decay warmup_epochs gradient_clip z_channels channels kl_weight perceptual_weight "
    "mixed_precision use_bf16 enable_tf32 channels_last persistent_workers use_torch_compile num_workers "
    "checkpoint_freq save_samples_freq val_split val_freq val_path max_steps keep_checkpoints early_stopping"
)


def test_help_shows_the_flags_that_people_use():
    """About forty, in groups, and how to see the rest."""
    shown = re.findall(r"^  --(?:\[no-\])?(\w+)", build_parser().format_help(), re.MULTILINE)
    assert set(shown) == {*COMMON, "help_all"}
    assert set(TYPED.split()) <= COMMON
    assert len(COMMON) < 45
    assert "--help_all shows all" in build_parser().format_help()


def test_help_all_shows_every_flag_with_its_help(capsys):
    with pytest.raises(SystemExit) as ended:
        parse_flags(["--help_all"])
    assert ended.value.code == 0
    shown = re.findall(r"^  --(?:\[no-\])?(\w+)", capsys.readouterr().out, re.MULTILINE)
    actions = [item.name for item in fields(ActionConfig)]
    assert shown == ["help_all", *actions, *all_options()]
    assert all(item.metadata["help"] for _, item in all_options().values())


def test_default_is_of_the_type_that_a_given_value_has():
    """A resumed run reads it from the checkpoint, and must store the same."""
    for name, (_, item) in all_options().items():
        assert item.default is None or coerce(item, item.default) == item.default, name
        assert item.default is None or type(coerce(item, item.default)) is type(item.default), name


def test_result_contains_only_given_flags():
    found = parse_flags(["--batch_size", "8", "--learning_rate", "3e-4", "--channels", "64", "128"])
    assert found == {"batch_size": 8, "learning_rate": 3e-4, "channels": (64, 128)}


def test_unknown_flag_is_reported_before_a_missing_one():
    with pytest.raises(UsageError, match=r"--vea: did you mean --vae\?"):
        parse_infer_flags(["--vea", "a"])


# --- JSON ---------------------------------------------------------------------------------------------


@pytest.fixture
def json_file(tmp_path):
    def write(content) -> str:
        path = tmp_path / "my.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def test_json_file_of_a_run_reproduces_its_config(json_file):
    plain = flatten(Config())
    del plain["config"]
    found = parse_flags(["--config", json_file(plain)])
    found.pop("config")
    assert build(found) == Config()


VALID = {
    "num_workers": (2, "2"),
    "learning_rate": (1, 1.0),
    "z_channels": ("8", 8),
    "channels": ([16, 32], (16, 32)),
    "data_path": ("my photos", ("my photos",)),
    "val_path": (Path("photos"), "photos"),
    "crop_scale": (0.5, (0.5,)),
    "save_samples_freq": (np.int64(3), 3),
}
INVALID = {
    "batch_size": (512.5, "x", True, [4, 8], None),
    "learning_rate": ("x", True, float("nan"), [1e-4]),
    "use_bf16": (1, "true", [True]),
    "channels": ([], ["x"], [8, None], {"a": 1}),
    "output_dir": (True, "", ["a", "b"], b"\xff" if os.name != "nt" else ""),
    "mixed_precision": ("yes",),
    "crop": ("middle",),
}


def test_flag_json_and_call_give_the_same_values(json_file):
    for name, (given, value) in VALID.items():
        plain = given if isinstance(given, int | float | list) else str(given)
        plain = int(plain) if isinstance(given, np.int64) else plain
        found = parse_flags(["--config", json_file({name: plain})])
        by_call = trainer_options({name: given})
        by_flag = parse_flags(command_words({name: given}))
        assert found[name] == by_call[name] == by_flag[name] == value
        assert type(found[name]) is type(by_call[name]) is type(by_flag[name]) is type(value)
    assert parse_flags(["--config", json_file({"max_steps": None})])["max_steps"] is None


def test_what_has_another_type_or_is_outside_the_limits_is_one_line(json_file):
    for name, values in INVALID.items():
        for given in values:
            with pytest.raises(UserError, match=f"--{name}[ :]") as caught:
                trainer_options({name: given})
            assert "\n" not in str(caught.value)
            if not isinstance(given, bytes):
                with pytest.raises(UserError, match=f"^--config .*--{name}[ :]"):
                    parse_flags(["--config", json_file({name: given})])
    with pytest.raises(UsageError, match="unknown flag --plan"):  # an action of the script
        trainer_options({"plan": True})


def test_home_folder_is_expanded_for_every_path(monkeypatch, tmp_path, json_file):
    """~ that no shell expands; as a part of a name it stays."""
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    scripts = (*CONFIG_OF.values(), EvaluateConfig, ExportConfig, InferConfig, TuneConfig, CheckConfig)
    for section in (*sections().values(), ActionConfig, *scripts):
        for item in fields(section):
            is_named_like_a_path = item.name.endswith(("_dir", "_path", "_file", "_from", "_weights"))
            if base_type(item) is str and (is_named_like_a_path or item.metadata["writes"]):
                value = coerce(item, "~/a b")
                assert Path(value[0] if is_list(item) else value) == tmp_path / "a b", item.name
    words = ["--data_path", "~/photos", "./~x", "--config", json_file({"output_dir": "~"})]
    found = parse_flags(words)
    assert list(map(Path, found["data_path"])) == [tmp_path / "photos", Path("~x")]
    assert found["output_dir"] == str(tmp_path)
    assert trainer_options({"exclude": Path("a~")})["exclude"] == "a~"
    if os.name == "nt":
        return
    assert trainer_options({"exclude": "~$list.txt"})["exclude"] == "~$list.txt"
    with pytest.raises(UserError, match=r"--output_dir .*\./~nobody-of-this-name/x"):
        trainer_options({"output_dir": "~nobody-of-this-name/x"})


@pytest.mark.parametrize("words", ["seed 9999999999999999999", "z_channels 9999999999", "disc_layers 100000"])
def test_numbers_that_no_network_or_tensor_can_have_are_refused(words):
    with pytest.raises(UserError, match=f"--{words.split()[0]} "):
        parse_flags(f"--{words}".split())
