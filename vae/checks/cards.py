"""Checks of the cards and their driver."""

from collections.abc import Callable
from functools import partial

from vae.checks import cuda_builds, remedies
from vae.checks.facts import Facts, SmiCard
from vae.checks.table import FAIL, PASS, SKIP, WARN, Cases, Check, first
from vae.system.gpu_memory import ALLOCATOR_VARIABLES, GROWING_SEGMENTS, growing_segments_supported
from vae.system.gpus import BF16_CAPABILITY, match_card
from vae.system.host import GIB

HIDING = ("", "-1", "nodevfiles")  # values of CUDA_VISIBLE_DEVICES that hide every card
MAX_USED_SHARE = 0.1  # share of a card's memory that other programs may use before a warning
# NVML's nvmlClocksEventReasons that indicate a problem; idling and the power cap under load do not.
CLOCK_REASONS = {
    0x08: "hardware slowdown (heat or power)",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake of the power supply",
}


def _present(facts: Facts) -> Cases:
    smi, update = facts.smi, remedies.update_driver(facts)
    names, message = ", ".join(facts.card_names), f"nvidia-smi: {smi.message}"
    yield smi.status == "answered" and smi.cards, PASS, names
    hanging, status = smi.status == "hanging", WARN if facts.devices else FAIL
    # waking a card may take longer
    yield hanging and facts.quick, WARN, message, "run the check without --quick, which waits longer"
    restart = f"restart the machine; if that does not help: {update}"
    yield hanging or smi.status == "failed", status, message, restart
    # PyTorch finds the card although nvidia-smi is missing
    note = "" if facts.torch_files.hip else "; nvidia-smi is missing, so its state is unknown"
    yield facts.devices, PASS, names + note
    why = "no nvidia-smi" if smi.status == "missing" else "the driver lists no card"
    on_cpu = f"no NVIDIA card ({why}): training runs on the CPU, which is only fast enough for trials"
    on_mac, elsewhere = facts.host.system == "Darwin", "train on a machine with an NVIDIA card"
    yield on_mac, WARN, f"{on_cpu}; Apple's GPU (MPS) is not used", elsewhere
    yield True, WARN, on_cpu, f"if the machine has a card: {update}"


def _visible(facts: Facts) -> Cases:
    value = facts.host.variables.get("CUDA_VISIBLE_DEVICES")
    yield value is None, SKIP, "not set: every card can be used"
    yield str(value).strip().lower() not in HIDING, PASS, f"{value!r}: only these cards are used"
    yield True, WARN, f"{value!r} hides every card", remedies.set_variable(facts, "CUDA_VISIBLE_DEVICES", "")


def _driver(facts: Facts) -> Cases:
    """The driver must be new enough for PyTorch's CUDA version and for the card."""
    cuda, driver = facts.torch_files.cuda, facts.smi.driver or ""
    capability = next((capability for _, capability in facts.capabilities), None)
    needed, branch = cuda_builds.needed_branch(cuda, capability), cuda_builds.driver_branch(driver)
    yield not driver, SKIP, "the driver version is unknown"
    yield branch is None or branch >= needed, PASS, driver
    reasons = [f"CUDA {cuda} needs {cuda_builds.needed_branch(cuda, None)}"] if cuda else []
    if capability and capability >= cuda_builds.BLACKWELL:
        reasons.append(f"RTX 50 and B200 need {cuda_builds.BLACKWELL_DRIVER}")
    remedy, older = remedies.update_driver(facts, needed), remedies.suggested(facts)
    if older:
        remedy += f"; or install the build for this driver: {remedies.setup(facts, older)}"
    yield True, FAIL, f"{driver}: too old", remedy, f"{needed} or newer: {', '.join(reasons)}"


def _usable(facts: Facts) -> Cases:
    loaded = facts.loaded
    yield not loaded.installed or loaded.error, SKIP, "PyTorch does not load"
    sizes = "; ".join(f"{card.name}, {card.memory_total / GIB:.1f} GiB" for card in facts.devices)
    yield facts.devices, PASS, sizes
    hung = loaded.unfinished == "looking for cards"
    yield hung, FAIL, f"looking for cards: {loaded.ended}", "restart the machine"
    yield not facts.smi.cards, SKIP, "there is no card"
    yield not facts.torch_files.cuda, SKIP, "this build of PyTorch has no CUDA (see Build of PyTorch)"
    status, _, unset, _ = first(_visible(facts))
    yield status == WARN, WARN, "CUDA_VISIBLE_DEVICES hides it", unset
    _, _, update, _ = first(_driver(facts))
    remedy = update or "restart the machine; start a container with --gpus all"
    yield True, FAIL, loaded.cuda_message or "no, without an error message", remedy


def _bf16(facts: Facts) -> Cases:
    cards, cpu = facts.capabilities, facts.loaded.cpu_bf16
    old = ", ".join(name for name, capability in cards if capability < BF16_CAPABILITY)
    use_fp16 = "train with --mixed_precision without --use_bf16: it uses fp16 there"
    yield old, WARN, f"{old} computes bf16 slowly or not at all", use_fp16
    yield cards, PASS, "in hardware"
    yield cpu is None, SKIP, "no card"
    yield cpu == "native", PASS, "in hardware, on the CPU: --mixed_precision uses bf16"
    yield True, PASS, "no bf16 instructions in the CPU: --mixed_precision uses fp32"


def _same(facts: Facts) -> Cases:
    names = facts.card_names
    yield len(names) < 2, SKIP, "one card or none"
    yield len(set(names)) == 1, PASS, f"{len(names)} x {names[0]}"
    found = f"{', '.join(names)}: training uses the first; together they run at the speed of the slowest"
    choose = f"to choose one: {remedies.set_variable(facts, 'CUDA_DEVICE_ORDER', 'PCI_BUS_ID')}, then "
    choose += f"{remedies.set_variable(facts, 'CUDA_VISIBLE_DEVICES', '0')} with its number in nvidia-smi"
    yield True, WARN, found, choose


def _profile(facts: Facts) -> Cases:
    sizes = [(card.name, card.memory_total / GIB) for card in facts.devices]
    sizes = sizes or [(c.name, c.memory_total_mib / 1024) for c in facts.smi.cards if c.memory_total_mib]
    yield not sizes, SKIP, "no card"
    name, gib = sizes[0]
    known = match_card(name, gib)
    yield known and known.settings, PASS, f"those of the {known and known.name}"
    yield True, PASS, f"{name} has none of its own: based on its {gib:.1f} GiB"


def _segments(facts: Facts) -> Cases:
    """The memory plan assumes that PyTorch allocates memory in segments that grow."""
    host, growing = facts.host, facts.loaded.growing_segments
    yield growing is None, SKIP, "no card, or PyTorch did not get as far"
    yield growing, PASS, "they grow"
    cost = "PyTorch reserves up to a sixth more memory, and images of 3840 px do not fit 32 GB"
    system = "Windows" if facts.on_windows else "WSL"
    unsupported = f"they do not grow: PyTorch does not support that on {system}; {cost}"
    yield not growing_segments_supported(host.system, host.release), PASS, unsupported
    own = {name: host.variables[name] for name in ALLOCATOR_VARIABLES if name in host.variables}
    refused = f"the driver refuses segments that grow: {cost}"
    yield GROWING_SEGMENTS in own.values(), WARN, refused, remedies.update_driver(facts)
    name, value = next(iter(own.items()), (ALLOCATOR_VARIABLES[0], "not set"))
    yield True, WARN, f"they do not grow ({name}: {value}): {cost}", f"unset {' '.join(own) or name}"


# Cases of one card, as nvidia-smi reports it.


def _memory(card: SmiCard) -> Cases:
    used, total = card.memory_used_mib or 0, card.memory_total_mib or 0
    yield card.memory_used_mib is None or not total, SKIP, ""
    found = f"{used / 1024:.1f} of {total / 1024:.1f} GiB in use"
    yield used <= MAX_USED_SHARE * total, PASS, found
    end = "end the processes that you do not need: nvidia-smi lists them"
    yield True, WARN, f"{found} by other programs", end


def _pcie(card: SmiCard) -> Cases:
    width, widest = card.pcie_width or 0, card.pcie_width_max or 0
    yield not (width and widest), SKIP, ""
    found = f"x{width} of x{widest}, generation {card.pcie_generation} of {card.pcie_generation_max} now"
    yield width >= widest, PASS, found
    yield True, WARN, found, "use the mainboard's x16 slot, and check for other slots that share its lanes"


def _power(card: SmiCard) -> Cases:
    watts = {"limit": card.power_limit_w, "default": card.power_default_w, "drawing now": card.power_draw_w}
    yield card.power_limit_w is None, SKIP, ""
    yield True, PASS, ", ".join(f"{name} {value:.0f} W" for name, value in watts.items() if value is not None)


def _clocks(card: SmiCard) -> Cases:
    mask = card.clock_reasons
    yield mask is None, SKIP, ""
    reasons = ", ".join(text for bit, text in CLOCK_REASONS.items() if (mask or 0) & bit)
    yield not reasons, PASS, "not reduced"
    check = "check fans, case airflow and power cables; nvidia-smi -q -d PERFORMANCE shows the reasons"
    yield True, WARN, reasons, check


def _temperature(card: SmiCard) -> Cases:
    yield card.temperature_c is None, SKIP, ""
    yield True, PASS, f"{card.temperature_c} C now"


def _each(cases: Callable[[SmiCard], Cases], facts: Facts) -> Cases:
    """The cases of every card as one check: the finding of each, and the first warning."""
    cards = facts.smi.cards
    yield not cards, SKIP, "nvidia-smi lists no card"
    known = [(card.index, case) for card in cards if (case := first(cases(card)))[0] != SKIP]
    yield not known, SKIP, "not reported by this card"
    found = "; ".join(f"{index}: {case[1]}" if len(cards) > 1 else case[1] for index, case in known)
    status, _, remedy, _ = next((case for _, case in known if case[0] == WARN), known[0][1])
    yield True, status, found, remedy


LANES = "all lanes; the generation drops while the card idles"
CARDS = [
    Check("card.present", "Card", "an NVIDIA card whose driver answers nvidia-smi", _present),
    Check("card.visible", "CUDA_VISIBLE_DEVICES", "not set, or card numbers", _visible),
    Check("card.driver", "Driver", "", _driver),
    Check("card.usable", "Usable by PyTorch", "torch.cuda.is_available()", _usable),
    Check("card.bf16", "bf16", "compute capability 8.0 or newer (RTX 30)", _bf16),
    Check("card.same", "Identical cards", "identical cards", _same),
    Check("card.profile", "Speed settings", "", _profile),
    Check("card.memory", "Memory in use", "at most a tenth", partial(_each, _memory)),
    Check("card.segments", "Memory segments", GROWING_SEGMENTS, _segments),
    Check("card.pcie", "PCIe", LANES, partial(_each, _pcie)),
    Check("card.power", "Power", "", partial(_each, _power)),
    Check("card.clocks", "Clocks", "no slowdown", partial(_each, _clocks)),
    Check("card.temperature", "Temperature", "", partial(_each, _temperature)),
]
