"""The reserve of the plan contains the workspace that cuDNN chooses for each convolution of a profile."""

from dataclasses import replace

import pytest
import torch

from tests.harness.cudnn_plans import RTX_5090, Convolutions, Cudnn, cudnn_library
from vae.config.recipes import RECIPES
from vae.config.resolve import resolve
from vae.memory.available import CUDA_RESERVE
from vae.memory.plan import choose_step, count_step, stage_spec, step_memory
from vae.system.host import GIB


@pytest.mark.slow
@pytest.mark.skipif(cudnn_library() is None, reason="no cuDNN is installed")
@pytest.mark.parametrize("profile", ["small", "standard", "ultra"])
def test_workspaces_on_an_rtx_5090(profile):
    config = resolve({}, None, RECIPES[profile].values, {})
    size, batch = config.data.image_size, config.run.batch_size
    spec = stage_spec(config, size, batch, torch.bfloat16, None)
    chosen = choose_step(spec, int(30.1 * GIB), "auto", "auto")
    count_step.cache_clear()
    with Convolutions() as convolutions:
        step_memory(replace(spec, recompute=chosen.recompute), chosen.micro_batch)
    cudnn = Cudnn(RTX_5090)
    workspaces = {convolution: cudnn.workspace_bytes(convolution) for convolution in convolutions.found}
    assert len(workspaces) > 60
    assert max(workspaces.values()) <= 0.35 * CUDA_RESERVE  # 164 MiB; the rest is for cuBLAS and gaps
