"""Launches of Triton kernels: repeated ones use compiled code, but only code for their arguments."""

import json

from tests.null_gpu.child import NEEDS_NULL_GPU, run_on_null_gpu

pytestmark = NEEDS_NULL_GPU

PROGRAM = """
import json, torch
from tests.null_gpu.counters import Counters
from vae.ops import library
from vae.ops.attention_triton import row_products, row_products_kernel

examined, run = [], row_products_kernel.run
def counted(*args, **kwargs):
    examined.append(1)
    return run(*args, **kwargs)
row_products_kernel.run = counted

def launched(a):  # new compiled code, and launches, of two calls
    out = torch.empty(a.shape[:2], device=a.device)
    before, known = Counters.now(), len(examined)
    row_products(a, a, out)
    row_products(a, a, out)
    return len(examined) - known, Counters.now().since(before).launches

buffer = torch.empty(2 * 3 * 64 + 1, device="cuda")
whole, shifted = buffer[:-1].view(2, 3, 64), buffer[1:].view(2, 3, 64)
found = [launched(whole), launched(whole), launched(shifted), launched(whole.bfloat16())]
found.append(launched(whole[:, :, :32].contiguous()))
codes = {id(code): code.asm["ptx"] for code in library._compiled_kernels.values()}
library.MAX_COMPILED_KERNELS = len(library._compiled_kernels)
launched(whole[:, :2].contiguous())
print(json.dumps([found, len(set(codes.values())), len(library._compiled_kernels)]))
"""


def test_compiled_code_is_used_for_equal_arguments_only():
    found, codes, kept = json.loads(run_on_null_gpu("-c", PROGRAM).stdout)
    assert found == [[1, 2], [0, 2], [1, 2], [1, 2], [1, 2]]
    assert codes == 4  # pointers that are no multiples of 16, another dtype, other rows of a tile
    assert kept == 1  # the memory of many sizes is limited
