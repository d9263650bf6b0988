"""Names of settings in other trainers, and what they are called here.

Of diffusers' example scripts, kohya's sd-scripts, OneTrainer, ai-toolkit and the VAE trainers of CompVis.
"""

_OTHER_NAMES = {
    "accumulation_steps": "gradient_accumulation_steps gradient_accumulation grad_accum",
    "adversarial_weight": "disc_weight disc_factor disc_scale gan_weight adv_weight gan_loss_weight",
    "batch_size": "bs train_batch_size per_device_train_batch_size batch",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "buckets": "enable_bucket aspect_ratio_bucketing enable_aspect_ratio_bucketing",
    "channels": "block_out_channels ch_mult",
    "checkpoint_freq": "save_every_n_epochs save_every checkpointing_epochs",
    "checkpoint_steps": "save_every_n_steps checkpointing_steps save_steps",
    "color_jitter": "color_aug",
    "crop": "center_crop",
    "data_path": "train_data_dir dataset dataset_name dataset_path data_dir data instance_data_dir "
    "folder_path concept_path",
    "disc_learning_rate": "disc_lr discriminator_lr",
    "ema_decay": "use_ema ema",
    "enable_tf32": "allow_tf32 tf32",
    "global_batch_size": "total_batch_size",
    "gradient_clip": "max_grad_norm grad_clip clip_grad clip_grad_norm gradient_clip_val",
    "horizontal_flip": "random_flip flip_aug hflip enable_random_flip",
    "image_size": "resolution img_size size crop_size res",
    "init_from": "pretrained_model_name_or_path pretrained vae vae_path base_model pretrained_vae "
    "base_model_name name_or_path finetune_from",
    "keep_checkpoints": "checkpoints_total_limit save_total_limit max_step_saves_to_keep",
    "kl_weight": "kl_scale kl_loss_weight beta_kl",
    "learning_rate": "lr base_learning_rate unet_lr",
    "lr_schedule": "lr_scheduler learning_rate_scheduler scheduler",
    "max_steps": "max_train_steps steps total_steps train_steps",
    "max_val_images": "num_validation_images",
    "mixed_precision": "amp fp16 train_dtype dtype",
    "norm_groups": "num_groups norm_num_groups",
    "num_epochs": "epoch epochs num_train_epochs max_train_epochs n_epochs",
    "num_workers": "workers dataloader_num_workers max_data_loader_n_workers",
    "optimizer": "optimizer_type",
    "output_dir": "out output save_dir workspace_dir training_folder logging_dir log_dir output_path "
    "output_name",
    "perceptual_weight": "lpips_scale lpips_weight lpips_loss_weight percep_weight",
    "persistent_workers": "persistent_data_loader_workers",
    "recompute": "gradient_checkpointing checkpoint_activations activation_checkpointing low_vram",
    "quick_val_steps": "validation_steps eval_steps",
    "reconstruction_loss": "rec_loss pixel_loss loss_type",
    "resume_from": "resume resume_from_checkpoint ckpt checkpoint",
    "save_samples_freq": "sample_every_n_steps sample_every log_image_freq",
    "train_part": "decoder_only train_decoder_only freeze_encoder",
    "use_bf16": "bf16 full_bf16",
    "use_torch_compile": "compile torch_compile",
    "val_freq": "validation_epochs eval_every",
    "val_path": "validation_data_dir val_data_dir eval_data_dir",
    "val_split": "val_ratio validation_split",
    "wandb": "report_to log_with use_wandb",
    "warmup_epochs": "lr_warmup_steps warmup_steps learning_rate_warmup_steps warmup",
    "weight_decay": "wd adam_weight_decay",
    "z_channels": "latent_channels embed_dim z_dim latent_dim",
}
_OURS = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}


def name_here(other: str) -> str | None:
    """Our name for a setting of another trainer, without dashes in front; None if none is recorded."""
    return _OURS.get(other.lower().replace("-", "_"))
