"""Names of settings in other trainers suggest ours."""

import pytest

from vae.config.declare import _OURS
from vae.config.flags import parse_flags, read_json
from vae.config.options import all_options
from vae.system.errors import UsageError, UserError


def test_every_name_leads_to_an_option_and_is_none_itself():
    options = all_options()
    for other, name in _OURS.items():
        assert other not in options
        assert name in options


@pytest.mark.parametrize(
    ("flags", "ours"),
    [
        (["--lr", "1e-4"], "--learning_rate"),
        (["--gradient-accumulation-steps=2"], "--accumulation_steps"),
        (["--gradient_checkpointing"], "--recompute"),
    ],
)
def test_a_flag_of_another_trainer_names_ours(flags, ours):
    with pytest.raises(UsageError, match=rf"unknown flag {flags[0].split('=')[0]}: did you mean {ours}\?"):
        parse_flags(flags)


@pytest.mark.parametrize("flag", ["--xformers", "--noise_offset"])
def test_a_flag_without_a_counterpart_suggests_none(flag):
    with pytest.raises(UsageError, match=rf"^unknown flag {flag} \(--help_all"):
        parse_flags([flag])


def test_a_key_of_another_trainer_names_ours(tmp_path):
    (tmp_path / "my.json").write_text('{"lr": 1e-4}')
    with pytest.raises(UserError, match=r'the unknown key "lr": did you mean learning_rate\?'):
        read_json(tmp_path / "my.json")
