"""What a run says of itself before it starts and after it has ended."""

import torch

from vae.console import command_line
from vae.gpus import match_card
from vae.host import GIB
from vae.training.checkpoints import epoch_name, step_name
from vae.training.logbook import REJECTED_NAME
from vae.training.schedule import warmup_steps
from vae.training.setup import Run
from vae.training.stage_memory import StagePlan, plan_line
from vae.training.stages import Stage, current_stage

MILLION = 1e6


def before_stage(run: Run, stage: Stage, plan: StagePlan) -> str:
    """Model, data, memory and steps of the stage that begins."""
    config, state = run.config, run.state
    per_epoch = run.steps_per_epoch(stage)
    total = stage.num_epochs * per_epoch
    warm_up = warmup_steps(config.optim.warmup_epochs, per_epoch, total)
    parameters = sum(p.numel() for p in state.autoencoder.parameters()) / MILLION
    held = f"{len(run.held.names)} held out" if run.held else "none held out: no validation"
    step_images = run.images_per_step(stage)
    lines = [
        f"model   {parameters:.1f} M parameters, widths {' '.join(map(str, config.model.channels))}, "
        f"{config.model.z_channels} latent channels, {state.autoencoder.downsampling}x smaller; "
        + _start(run),
        f"data    {len(run.train_names)} images of {config.data.data_path}, {held}; "
        f"{stage.image_size} px {config.data.crop} crops, {run.num_workers} workers",
        f"loss    {_loss(run)}",
        f"device  {_device(run)}",
        f"plan    {plan_line(run, stage, plan)}",
        f"steps   {total} of {step_images} images: epochs {stage.first_epoch + 1} to {stage.end_epoch}, "
        f"{per_epoch} steps each; {warm_up} of warm-up, then {config.optim.lr_schedule} from "
        f"{config.optim.learning_rate:g}",
        f"output  {run.output_dir}   (tensorboard --logdir {run.output_dir / 'logs'})",
    ]
    return "\n".join(lines)


def _start(run: Run) -> str:
    if run.resumed_from:
        return f"from {run.resumed_from}, step {run.state.position.step}"
    if run.config.model.init_from:
        return f"from {run.config.model.init_from}"
    return f"{run.config.model.init} start"


def _loss(run: Run) -> str:
    loss = run.config.loss
    parts = [f"{loss.reconstruction_weight:g} {loss.reconstruction_loss}", f"{loss.kl_weight:g} KL"]
    if loss.perceptual_weight:
        parts.insert(1, f"{loss.perceptual_weight:g} LPIPS ({loss.perceptual_net})")
    if loss.adversarial_weight:
        parts.append(f"{loss.adversarial_weight:g} adversarial from step {loss.disc_start}")
    return " + ".join(parts)


def _device(run: Run) -> str:
    device = run.processes.device
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        known = match_card(facts.name, facts.total_memory / GIB)
        name = facts.name if known else f"{facts.name}, no profile: settings come from its memory"
    else:
        name = f"{torch.get_num_threads()} threads"
    kind = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16 with loss scaling"}
    speed = run.config.speed
    extras = ["TF32"] if speed.enable_tf32 and device.type == "cuda" else []
    extras += ["channels_last"] * speed.channels_last + ["compiled"] * run.compiled
    world = f", {run.processes.world} processes" if run.processes.world > 1 else ""
    return f"{device.type} ({name}){world}, " + ", ".join([kind[run.networks.dtype], *extras])


def after_run(run: Run, shipped: tuple[float, float] | None) -> str:
    """Best metrics, files written and the next command to type."""
    best, newest = run.state.history.best, run.newest
    factor = run.state.autoencoder.downsampling
    lines = [_how_far(run)]
    measured = {}
    if best.get("image_size") == newest.get("image_size", best.get("image_size")) and "psnr" in best:
        measured[f"best, epoch {int(best['epoch'])}"] = best
    if "psnr" in newest and newest != best:
        measured[f"at step {run.validated_step}"] = newest
    if measured:
        lines += [_metrics_line(name, values) for name, values in measured.items()]
        shown = {"bicubic": f"{factor}x bicubic", "mean_colour": "mean colour"}
        lines += [_metrics_line(shown[name], values) for name, values in sorted(run.held.baselines.items())]
        if not any("lpips" in values for values in measured.values()):
            lines.append("LPIPS was not measured: --perceptual_weight 0 loads no network for it")
        elif run.config.loss.perceptual_net == "random":
            lines.append("LPIPS is of random weights (--perceptual_net random): compare it with no other")
    if run.rejected:
        lines.append(f"{len(run.rejected)} images were skipped: {run.output_dir / REJECTED_NAME}")
    if shipped:
        constants = f"scaling {shipped[0]:.4f}, shift {shipped[1]:.4f}"
        if run.config.model.latent_norm:
            constants = "statistics of its latents in the file"
        lines.append(f"VAE     {run.output_dir / 'vae'} ({constants})")
    if any((run.output_dir / "samples").glob("*.png")):
        lines.append(
            f"samples {run.output_dir / 'samples'} (input, reconstruction, error x8, {factor}x bicubic)"
        )
    lines.append(f"next    {next_command(run)}")
    return "\n".join(lines)


def _how_far(run: Run) -> str:
    """Epochs, with the tenths of a begun one, steps and images."""
    position, epochs = run.state.position, f"{run.state.position.epoch} epochs"
    stage = current_stage(run.stages, position.epoch)
    if stage is not None:
        tenths = 10 * position.images_in_epoch // (run.steps_per_epoch(stage) * run.images_per_step(stage))
        epochs = f"{position.epoch}.{tenths} of {run.stages[-1].end_epoch} epochs"
    return f"done: {epochs}, {position.step} steps, {position.images} images"


def _metrics_line(name: str, values: dict[str, float]) -> str:
    lpips = f"   LPIPS {values['lpips']:.4f}" if "lpips" in values else ""
    return f"{name:<16} PSNR {values['psnr']:6.2f} dB   SSIM {values['ssim']:.4f}{lpips}"


def next_command(run: Run) -> str:
    """What finishes an unfinished run (no checkpoint holds --max_steps), or trains a finished one further."""
    position = run.state.position
    name = step_name(position.step) if position.images_in_epoch else epoch_name(position.epoch)
    path = run.output_dir / name
    if run.resumed_from and not path.exists():  # nothing was left to train, and the run is shipped elsewhere
        path = run.resumed_from
    more = ["--num_epochs", "10"] if current_stage(run.stages, position.epoch) is None else []
    return command_line("python", "train_vae.py", "--resume_from", path, *more)
