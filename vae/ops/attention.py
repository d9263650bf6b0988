"""One-head attention that never holds the N x N score matrix: blocks of queries, redone in backward."""

import math

import torch

SCORE_BLOCK_ELEMENTS = 2**24  # scores held at once per image: 64 MiB in fp32, 1024 queries at 16,384 tokens


def attention_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(C)) v over tokens, q k v (B, N, C), with the whole score matrix in memory."""
    scores = torch.baddbmm(_nothing(q), q, k.transpose(1, 2), beta=0, alpha=1 / math.sqrt(q.shape[-1]))
    return scores.softmax(dim=-1, dtype=_softmax_dtype(q)).to(q.dtype) @ v


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """attention_reference with memory linear in N; the softmax is in fp32 (fp64 for fp64 inputs)."""
    return _BlockAttention.apply(q, k, v)


def _nothing(like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(1)


def _softmax_dtype(like: torch.Tensor) -> torch.dtype:
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def _blocks(tokens: int) -> list[slice]:
    size = max(1, min(tokens, SCORE_BLOCK_ELEMENTS // tokens))
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def _probabilities(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Attention weights (block, N) of one image's queries (block, C) over all its keys (N, C)."""
    scores = torch.addmm(_nothing(q), q, k.t(), beta=0, alpha=1 / math.sqrt(q.shape[-1]))
    return scores.softmax(dim=-1, dtype=_softmax_dtype(q))


class _BlockAttention(torch.autograd.Function):
    """Saves q, k, v and the output; backward follows Dao et al. 2022, appendix B, block by block."""

    @staticmethod
    def forward(ctx, q, k, v):
        out = torch.empty_like(q)
        for image in range(q.shape[0]):
            for rows in _blocks(q.shape[1]):
                out[image, rows] = _probabilities(q[image, rows], k[image]).to(q.dtype) @ v[image]
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_out):
        q, k, v, out = ctx.saved_tensors
        wide = _softmax_dtype(q)
        scale = 1 / math.sqrt(q.shape[-1])
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros_like(k, dtype=wide)  # summed over blocks: bf16 would lose the small ones
        grad_v = torch.zeros_like(v, dtype=wide)
        for image in range(q.shape[0]):
            for rows in _blocks(q.shape[1]):
                grad = grad_out[image, rows]
                weights = _probabilities(q[image, rows], k[image])  # (block, N)
                grad_v[image] += weights.to(q.dtype).t() @ grad
                delta = (grad.to(wide) * out[image, rows].to(wide)).sum(dim=-1, keepdim=True)
                grad_scores = (weights * ((grad @ v[image].t()).to(wide) - delta) * scale).to(q.dtype)
                grad_q[image, rows] = grad_scores @ k[image]
                grad_k[image] += grad_scores.t() @ q[image, rows]
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)
