"""Precedence of flag, JSON file, checkpoint, profile, card and default, and checks across options."""

import json
from dataclasses import astuple, replace

import pytest

from vae.config.flags import parse_flags
from vae.config.model_options import ModelConfig
from vae.config.options import MIN_VIEW, Config, LossConfig, build, flatten
from vae.config.recipes import RECIPES, profile_table, recipe_values, suggested_profile
from vae.config.resolve import (
    LEAST_SIDES,
    PER_COMMAND,
    check_discriminator,
    check_encoder,
    check_views,
    parse_progressive,
    resolve,
    tiny_shape,
    with_local_batch,
)
from vae.losses.perceptual import TRUNKS
from vae.system.errors import UserError

# The value that each source sets for one option, in order of precedence.
SOURCES = {"given": 1, "checkpoint": 2, "profile": 3, "card": 4}


def checkpoint(**values) -> dict:
    return {**flatten(Config()), **values}


@pytest.mark.parametrize("first", range(5))
def test_precedence(first):
    layers = [{"prefetch_factor": value} for value in SOURCES.values()]
    given, saved, profile, card = [{}] * first + layers[first:]
    saved = checkpoint(**saved) if saved else None
    found = resolve(given, saved, profile, card)
    expected = [*SOURCES.values(), Config().data.prefetch_factor][first]
    assert found.data.prefetch_factor == expected


def test_checkpoint_value_that_equals_the_default_overrides_the_profile():
    assert (
        resolve({}, checkpoint(), profile={"batch_size": 24}).run.batch_size == Config().run.batch_size == 4
    )


def test_flag_overrides_json_and_json_overrides_profile(tmp_path):
    path = tmp_path / "my.json"
    path.write_text(json.dumps({"image_size": 256, "batch_size": 3}))
    given = parse_flags(["--config", str(path), "--profile", "standard", "--batch_size", "2"])
    found = resolve(given, profile=recipe_values("standard", has_gpu=True))
    assert (found.run.batch_size, found.data.image_size, found.speed.mixed_precision) == (2, 256, True)


def test_per_command_options_are_not_inherited():
    saved = checkpoint(max_steps=7, output_dir="elsewhere", device="cuda", micro_batch_size="1", z_channels=4)
    saved |= {"cache_dir": "elsewhere", "cache_gib": 1e-6}
    found = resolve({}, saved)
    assert found.run.max_steps is None
    assert found.run.output_dir == "./outputs"
    assert found.speed.device == found.speed.micro_batch_size == "auto"
    assert (found.data.cache_dir, found.data.cache_gib) == (None, Config().data.cache_gib)
    assert found.model.z_channels == 4
    assert flatten(Config()).keys() >= PER_COMMAND


def test_shape_of_the_checkpoint_may_be_repeated():
    """tests/scripts/test_mistakes.py has what contradicts it."""
    resolve({"z_channels": 16, "channels": [128, 256, 512, 512], "use_quant_conv": False}, checkpoint())


def test_discriminator_shape_is_checked_only_if_the_checkpoint_has_one():
    resolve({"disc_channels": 32}, checkpoint())
    with pytest.raises(UserError, match="--disc_channels 32"):
        resolve({"disc_channels": 32}, checkpoint(adversarial_weight=0.5))


@pytest.mark.parametrize("size", [-8, 0, 8, 11])
def test_too_small_image_size_names_the_smallest_valid_size(size):
    with pytest.raises(
        UserError, match=f"--image_size {size} is too small: the minimum is 16, in steps of 8"
    ):
        resolve({"image_size": size})
    resolve({"image_size": 16})
    resolve({"image_size": 500, "channels": [128, 256, 512]})  # three levels: a multiple of 4
    resolve({"image_size": 500}, vae={"channels": [128, 256, 512]})


def test_a_crop_that_is_too_small_for_views_is_one_line():
    with pytest.raises(UserError, match=r"images of 24 px, and --perceptual_net alex needs 31: .* 124"):
        check_views(96, ModelConfig(), LossConfig(equivariance_weight=1.0, perceptual_net="alex"))
    for least, net in ((124, "alex"), (68, "squeeze"), (32, "vgg")):
        check_views(least, ModelConfig(), LossConfig(equivariance_weight=1.0, perceptual_net=net))
        assert TRUNKS[net].smallest_side == LEAST_SIDES.get(net, MIN_VIEW)
    with pytest.raises(UserError, match="needs at least 2 x 2 positions, not 1 of a crop of 32 px"):
        check_views(32, ModelConfig(channels=(32,) * 6), LossConfig(equivariance_weight=1.0))


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("crop_scale", {"crop_scale": (0.1, 1.0)}),
        ("crop_scale", {"crop_scale": (0.9, 0.5), "crop": "resized"}),
        ("crop", {"crop": "resized", "buckets": 2}),
        ("rotate90", {"rotate90": True, "buckets": 2}),
        ("color_jitter", {"color_jitter": (0.1, 0.1)}),
        ("color_jitter", {"color_jitter": (0.0, 0.0, 0.0, 0.6)}),
        ("teacher", {"teacher": "vae"}),
        ("background", {"background": "black", "image_channels": 4}),
        ("reconstruction_weight", {"reconstruction_weight": 0.0, "perceptual_weight": 0.0}),
        ("mse_weight", {"mse_weight": 0.5, "reconstruction_loss": "mse"}),
        ("module", {"module": "no JSON"}),
        ("disc_start", {"disc_start": 1.5}),
        ("perceptual_weights", {"perceptual_weights": "file", "perceptual_net": "random"}),
        ("variance_weight", {"variance_weight": 0.1, "train_part": "decoder"}),
    ],
)
def test_options_that_contradict_each_other(flag, given):
    with pytest.raises(UserError, match=rf"^--{flag}\b"):
        resolve(given)
    allowed = {"crop_scale": (0.1, 1.0), "crop": "resized", "disc_start": 0.5, "perceptual_weights": "file"}
    resolve(allowed)
    resolve({"reconstruction_weight": 0.0, "perceptual_weight": 0.0, "mse_weight": 0.5})


def test_find_lr_is_without_the_adversarial_loss():
    assert resolve({"find_lr": True, "adversarial_weight": 0.5}).loss.adversarial_weight == 0


def test_a_restart_may_repeat_init_from():
    saved = checkpoint(init_from="/vae")
    given = {"init_from": "vae", "resume_from": "latest"}
    assert resolve(given, saved).model.init_from == "/vae"
    with pytest.raises(UserError, match="--init_from and --resume_from"):
        resolve({**given, "resume_from": "checkpoint.pt"}, saved)


def test_discriminator_fits_crops_and_norms():
    loss = resolve({"adversarial_weight": 0.5, "disc_layers": 3, "disc_channels": 16}).loss
    check_discriminator(24, loss)
    check_discriminator(8, replace(loss, adversarial_weight=0.0))
    for size, changed in ((23, loss), (24, replace(loss, disc_channels=24))):
        with pytest.raises(UserError, match="--disc_"):
            check_discriminator(size, changed)


def test_build_inverts_flatten():
    config = build({"channels": [64, 128], "learning_rate": 3e-4, "use_bf16": True, "max_steps": 5})
    assert build(flatten(config)) == config
    assert json.loads(json.dumps(flatten(config))) == flatten(config)


def test_the_file_of_init_from_has_the_shape_except_for_what_is_changed():
    shape = {"channels": [16, 32, 32], "norm_groups": 8, "z_channels": 4, "decoder_layers_per_block": 1}
    given = {"init_from": "v", "z_channels": 4, "image_channels": 4, "decoder_layers_per_block": 3}
    profile = {"channels": [8], "layers_per_block": 1, "decoder_channels": [8, 16, 16]}
    model = resolve(given, profile=profile, vae=shape).model
    assert (model.channels, model.z_channels, model.norm_groups) == ((16, 32, 32), 4, 8)
    assert (model.image_channels, model.layers_per_block) == (4, 1)
    assert (model.decoder_channels, model.decoder_layers_per_block) == ((8, 16, 16), 3)
    assert resolve({}, vae=shape).model.decoder_layers_per_block == 1
    for wrong, flag in (
        ({"channels": [16, 32]}, "--channels 16 32 contradicts the file of --init_from"),
        ({"image_channels": 4, "train_part": "decoder"}, "--image_channels 4 changes the encoder"),
        ({"decoder": "tiny"}, "--decoder tiny learns"),
    ):
        with pytest.raises(UserError, match=flag):
            resolve(wrong, vae=shape)
    with pytest.raises(UserError, match="--image_channels 3 contradicts"):
        resolve({"image_channels": 3}, vae=shape | {"image_channels": 4})


def test_an_autoencoder_tiny_has_the_latents_of_its_teacher():
    teacher = ModelConfig(channels=(8, 8, 8), z_channels=4)
    given = {"family": "tiny", "teacher": "t"}
    config = resolve(given, teacher=teacher)
    assert (config.model.channels, config.model.z_channels) == ((64, 64, 64), 4)
    assert (config.model.scaling_factor, config.model.init, config.loss.kl_weight) == (1, "default", 0)
    other = tiny_shape(4, 2)
    assert resolve({"teacher": "t"}, vae=tiny_shape(4, 3), teacher=teacher).model == config.model
    saved = checkpoint(**other, adversarial_weight=0.0)
    for wrong, sources, flag in (
        ({"z_channels": 8}, {}, "--z_channels 8 contradicts the file of --teacher"),
        ({}, {"vae": other}, "--teacher t has 4 .* 3 levels, but the file of --init_from has 4 and 2"),
        ({}, {"checkpoint": saved}, "--teacher t has .* but the file of --resume_from has 4 and 2"),
        ({"variance_weight": 0.1}, {}, "--variance_weight 0.1: .* has no variance"),
        ({"scaling_factor": 0.5}, {}, "--scaling_factor 0.5: an AutoencoderTiny has its own"),
        ({"image_channels": 4}, {}, "--image_channels 4: an AutoencoderTiny has its own"),
        ({"train_part": "decoder"}, {}, "--teacher has no effect"),
    ):
        with pytest.raises(UserError, match=flag):
            resolve({**given, **wrong}, **sources, teacher=teacher)


# --- profiles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ultra", "standard", "maximum", "card-8gb", "card-24gb"])
def test_profile_changes_neither_losses_nor_the_optimizer(name):
    config = resolve({}, profile=recipe_values(name, has_gpu=True))
    assert config.loss == Config().loss
    assert config.optim == Config().optim
    assert not config.speed.use_torch_compile  # as many launches and as much memory with it (docs/rtx5090.md)


def test_every_profile_resolves_and_is_listed():
    for name in RECIPES:
        resolve({}, profile=recipe_values(name, has_gpu=False))
        assert f"\n{name} " in f"\n{profile_table()}"


@pytest.mark.parametrize(
    ("vram_gib", "name"),
    [
        (None, "demo"),
        (4, "demo"),
        (6, "card-8gb"),
        (7.96, "card-8gb"),
        (11, "card-8gb"),  # RTX 2080 Ti
        (11.94, "card-12gb"),
        (15, "card-16gb"),  # T4
        (15.9, "card-16gb"),
        (22.5, "card-24gb"),  # A10, L4
        (31.8, "standard"),
        (140, "standard"),
    ],
)
def test_suggested_profile_fits_the_memory(vram_gib, name):
    assert suggested_profile(vram_gib) == name
    assert name in RECIPES


def test_decoder_profile_trains_the_decoder_of_a_given_vae():
    profile = recipe_values("decoder", has_gpu=True)
    config = resolve({"init_from": "vae.safetensors"}, profile=profile)
    check_encoder(config, {"profile": "decoder", "init_from": "vae.safetensors"})
    assert config.optim.train_part == "decoder"
    assert config.optim.learning_rate is None  # the rule takes half of it for a trained VAE
    assert config.loss.perceptual_weight == config.loss.reconstruction_weight == 1
    assert config.loss.adversarial_weight > 0
    with pytest.raises(UserError, match=r"--profile decoder: .*--init_from"):
        check_encoder(resolve({"profile": "decoder"}, profile=profile), {"profile": "decoder"})


# --- stages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whole", "processes", "accumulation", "local"),
    [(64, 1, 1, 64), (64, 8, 2, 4), (63, 7, 3, 3), (6, 6, 1, 1)],
)
def test_global_batch_is_divided_among_processes(whole, processes, accumulation, local):
    config = resolve({"global_batch_size": whole, "accumulation_steps": accumulation})
    assert with_local_batch(config, processes).run.batch_size == local
    resumed = resolve({}, checkpoint(global_batch_size=whole, accumulation_steps=accumulation, batch_size=99))
    assert with_local_batch(resumed, processes).run.batch_size == local


@pytest.mark.parametrize(("whole", "sizes"), [(64, "56 or 112"), (5, "56,")])
def test_global_batch_that_does_not_divide_names_those_that_do(whole, sizes):
    config = resolve({"global_batch_size": whole, "accumulation_steps": 2})
    with pytest.raises(UserError, match=f"--global_batch_size {whole} .* 28 processes .*: use {sizes}"):
        with_local_batch(config, 28)


def test_global_batch_and_batch_per_device_exclude_each_other(tmp_path):
    for other in ({"batch_size": 4}, {"progressive": "32:1:2"}):
        with pytest.raises(UserError, match=f"--global_batch_size 8 and --{next(iter(other))}"):
            resolve({"global_batch_size": 8, **other})
    resumed = resolve({"batch_size": 3}, checkpoint(global_batch_size=8, adversarial_weight=0.0))
    assert (resumed.run.batch_size, resumed.run.global_batch_size) == (3, None)
    path = tmp_path / "config.json"  # of a run, which has both
    path.write_text(json.dumps({"global_batch_size": 8, "batch_size": 4}))
    file = {"config": str(path)}
    assert parse_flags(["--config", str(path)]) == {**file, "global_batch_size": 8}
    assert parse_flags(["--config", str(path), "--batch_size", "2"]) == {**file, "batch_size": 2}


def test_length_in_epochs_and_in_steps_exclude_each_other(tmp_path):
    with pytest.raises(UserError, match=r"--num_epochs 3 and --num_steps 40 .*remove one"):
        resolve({"num_epochs": 3, "num_steps": 40})
    demo = {"num_epochs": 15}
    saved = checkpoint(num_steps=40, num_epochs=None, adversarial_weight=0.0)
    path = tmp_path / "config.json"  # of a run
    path.write_text(json.dumps({"num_epochs": None, "num_steps": 40}))
    lengths = [
        (resolve({}), 100, None),
        (resolve({"num_steps": 40}, profile=demo), None, 40),
        (resolve({}, saved, demo), None, 40),
        (resolve({"num_epochs": 3}, saved), 3, None),
        (resolve(parse_flags(["--config", str(path)])), None, 40),
        (resolve(parse_flags(["--config", str(path), "--num_epochs", "3"])), 3, None),
    ]
    for config, num_epochs, num_steps in lengths:
        assert (config.run.num_epochs, config.run.num_steps) == (num_epochs, num_steps)


def test_progressive_list_is_parsed():
    found = parse_progressive("512:25:32, 1024:500steps:16", Config().model)
    assert [astuple(stage) for stage in found] == [(512, 25, None, 32), (1024, None, 500, 16)]
    with pytest.raises(UserError, match="--image_size 500"):
        parse_progressive("512:25:32,500:1:4", Config().model)
