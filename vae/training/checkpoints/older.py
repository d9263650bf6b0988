"""What values of checkpoints mean now: those of earlier versions, and those that the data has decided."""

from typing import Any

from vae.system import console
from vae.training.stages import Position, Stage, current_stage

KL_UNIT = "nats per pixel"  # of --kl_weight in a checkpoint; without the key it counted nats per image


def keep_order(content: dict[str, Any]) -> None:
    """Add the --data_streams and --shuffle_shards of the run, if it was started without them.

    An earlier version without --shuffle_shards had four shards per stream.
    """
    config, topology = content["config"], (content.get("contract") or {}).get("topology") or {}
    config.setdefault("data_streams", 64)
    if "shuffle_shards" not in config:
        config["shuffle_shards"] = 4 * (topology.get("streams") or config["data_streams"])
        if topology.get("streams"):
            topology["shuffle_shards"] = config["shuffle_shards"]
    for name, of_run in (("data_streams", "streams"), ("shuffle_shards", "shuffle_shards")):
        if config.get(name) is None:
            config[name] = topology.get(of_run)


def convert_kl_weight(content: dict[str, Any], is_given: bool) -> None:
    """Change the --kl_weight of an earlier version in `content` to nats per pixel, and print both.

    It counted nats per image, so it meant more for larger crops. The converted weight means the same at the
    image size of the checkpoint's stage. `is_given`: another one is given, so nothing is printed.
    """
    if content.get("kl_unit") == KL_UNIT:
        return
    config, stages = content["config"], [Stage(**stage) for stage in content["stages"]]
    stage = current_stage(stages, Position(**content["position"]).epoch) or stages[-1]
    before = config.get("kl_weight", 1e-6)
    config["kl_weight"] = before * stage.image_size**2
    content["kl_unit"] = KL_UNIT
    if not is_given:
        console.info(
            f"note: the checkpoint's --kl_weight {before:g} is of an earlier version, for nats per image: at "
            f"{stage.image_size} px this is --kl_weight {config['kl_weight']:.3g}, for nats per pixel, which "
            "this run uses; a lower one keeps more detail (docs/training.md#the-kl-term)"
        )
