"""Command-line flags and JSON files of the trainer: names, defaults, validation and docs/flags.md."""

import json
import re
from dataclasses import fields

import pytest

from tests.harness.runs import ROOT
from vae.config.flags import COMMON, build_parser, flags_markdown, parse_flags
from vae.config.options import ActionConfig, Config, all_options, build, flatten
from vae.config.trained_vae_flags import parse_infer_flags
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


def test_result_contains_only_given_flags():
    found = parse_flags(["--batch_size", "8", "--learning_rate", "3e-4", "--channels", "64", "128"])
    assert found == {"batch_size": 8, "learning_rate": 3e-4, "channels": [64, 128]}


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


def test_json_number_is_converted_to_the_option_type(json_file):
    found = parse_flags(["--config", json_file({"num_workers": 2, "learning_rate": 1, "max_steps": None})])
    assert found["num_workers"] == "2"
    assert found["learning_rate"] == 1.0
    assert isinstance(found["learning_rate"], float)
    assert found["max_steps"] is None


@pytest.mark.parametrize("words", ["seed 9999999999999999999", "z_channels 9999999999", "disc_layers 100000"])
def test_numbers_that_no_network_or_tensor_can_have_are_refused(words):
    with pytest.raises(UserError, match=f"--{words.split()[0]} "):
        parse_flags(f"--{words}".split())
