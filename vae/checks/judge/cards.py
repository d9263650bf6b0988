"""Judges the cards and their driver, from facts only."""

from collections.abc import Callable

from vae.checks import cuda_builds, remedies
from vae.checks.facts import CudaDevice, Facts, SmiCard
from vae.checks.results import FAIL, PASS, SKIP, WARN, Check
from vae.config.gpu_memory import ALLOCATOR_VARIABLES, GROWING_SEGMENTS, growing_segments_supported
from vae.gpus import BF16_CAPABILITY, match_card
from vae.host import GIB

HIDING = ("", "-1", "nodevfiles")  # values of CUDA_VISIBLE_DEVICES that hide every card
MAX_USED_SHARE = 0.1  # share of a card's memory that other programs may use before a warning
# NVML's nvmlClocksEventReasons that indicate a problem; idling and the power cap under load do not.
CLOCK_REASONS = {
    0x08: "hardware slowdown (heat or power)",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake of the power supply",
}

Verdict = tuple[str, str, str]  # status, found, remedy


def judge_cards(facts: Facts) -> list[Check]:
    return [
        _present(facts),
        _visible(facts),
        _driver(facts),
        _usable(facts),
        _architecture(facts),
        _bf16(facts),
        _same(facts),
        _profile(facts),
        _memory(facts),
        _segments(facts),
        _pcie(facts),
        _power(facts),
        _clocks(facts),
        _temperature(facts),
    ]


def _devices(facts: Facts) -> tuple[CudaDevice, ...]:
    return facts.loaded.devices if facts.loaded else ()


def _present(facts: Facts) -> Check:
    """Whether there is a card and its driver answers."""
    check, title, smi = "card.present", "Card", facts.smi
    expected = "an NVIDIA card whose driver answers nvidia-smi"
    devices = _devices(facts)
    names = [card.name for card in smi.cards] or [card.name for card in devices]
    if smi.status == "answered" and smi.cards:
        return Check(check, title, PASS, ", ".join(names), expected)
    if smi.status == "hanging" and facts.quick:  # waking a card may take longer
        remedy = "run the check without --quick, which waits longer"
        return Check(check, title, WARN, f"nvidia-smi: {smi.message}", expected, remedy)
    if smi.status in ("hanging", "failed"):
        restart = "restart the machine; if that does not help: " + remedies.update_driver(facts)
        return Check(check, title, WARN if devices else FAIL, f"nvidia-smi: {smi.message}", expected, restart)
    if devices:  # PyTorch finds the card although nvidia-smi is missing
        note = "" if facts.torch_files.hip else "; nvidia-smi is missing, so its state is unknown"
        return Check(check, title, PASS, ", ".join(names) + note, expected)
    why = "no nvidia-smi" if smi.status == "missing" else "the driver lists no card"
    found = f"no NVIDIA card ({why}): training runs on the CPU, which is only fast enough for trials"
    mac = facts.host.system == "Darwin"
    remedy = "" if mac else f"if the machine has a card: {remedies.update_driver(facts)}"
    return Check(check, title, WARN, found, expected, remedy)


def _visible(facts: Facts) -> Check:
    check, title = "card.visible", "CUDA_VISIBLE_DEVICES"
    value = facts.host.variables.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return Check(check, title, SKIP, "not set: every card can be used")
    if value.strip().lower() not in HIDING:
        return Check(check, title, PASS, f"{value!r}: only these cards are used")
    remedy = "set CUDA_VISIBLE_DEVICES=" if remedies.on_windows(facts) else "unset CUDA_VISIBLE_DEVICES"
    return Check(check, title, WARN, f"{value!r} hides every card", "not set, or card numbers", remedy)


def _driver(facts: Facts) -> Check:
    """Whether the driver is new enough for PyTorch's CUDA version and for the card."""
    check, title = "card.driver", "Driver"
    if not facts.smi.driver:
        return Check(check, title, SKIP, "the driver version is unknown")
    cuda, capability = facts.torch_files.cuda, remedies.first_capability(facts)
    needed = cuda_builds.needed_branch(cuda, capability)
    branch = cuda_builds.driver_branch(facts.smi.driver)
    reasons = [f"CUDA {cuda} needs {cuda_builds.needed_branch(cuda, None)}"] if cuda else []
    if capability and capability >= cuda_builds.BLACKWELL:
        reasons.append(f"RTX 50 and B200 need {cuda_builds.BLACKWELL_DRIVER}")
    expected = f"{needed} or newer: {', '.join(reasons)}" if needed else "any: this build has no CUDA"
    if branch is None or branch >= needed:
        return Check(check, title, PASS, facts.smi.driver, expected)
    remedy = remedies.update_driver(facts, needed)
    older = remedies.suggested(facts)
    if older:
        remedy += f"; or install the build for this driver: {remedies.setup(facts, older)}"
    return Check(check, title, FAIL, f"{facts.smi.driver}: too old", expected, remedy)


def _usable(facts: Facts) -> Check:
    """Whether PyTorch can use the card."""
    check, title, expected = "card.usable", "Usable by PyTorch", "torch.cuda.is_available()"
    loaded = facts.loaded
    if loaded is None or loaded.error:
        return Check(check, title, SKIP, "PyTorch does not load")
    if loaded.devices:
        sizes = [f"{card.name}, {card.memory_total / GIB:.1f} GiB" for card in loaded.devices]
        return Check(check, title, PASS, "; ".join(sizes), expected)
    if loaded.unfinished == "looking for cards":
        remedy = "restart the machine"
        return Check(check, title, FAIL, f"looking for cards: {loaded.ended}", expected, remedy)
    if not facts.smi.cards:
        return Check(check, title, SKIP, "there is no card")
    if not facts.torch_files.cuda:
        return Check(check, title, SKIP, "this build of PyTorch has no CUDA (see Build of PyTorch)")
    visible = _visible(facts)
    if visible.status == WARN:
        return Check(check, title, WARN, "CUDA_VISIBLE_DEVICES hides it", expected, visible.remedy)
    driver = _driver(facts)
    restart = "restart the machine; start a container with --gpus all"
    remedy = driver.remedy if driver.status == FAIL else restart
    return Check(check, title, FAIL, loaded.cuda_message or "no, without an error message", expected, remedy)


def _architecture(facts: Facts) -> Check:
    """Whether the build has code for the card; if not, every kernel fails with `no kernel image`."""
    check, title = "torch.architectures", "Code for the card"
    arch_list = facts.loaded.arch_list if facts.loaded else ()
    cards = remedies.capabilities(facts)
    if not facts.loaded:
        return Check(check, title, SKIP, "PyTorch does not load")
    if not arch_list or not cards or facts.torch_files.hip:
        return Check(check, title, SKIP, "no card" if arch_list else "this build has no CUDA")
    runs = [cuda_builds.runs_on(capability, arch_list) for _, capability in cards]
    expected = ", ".join(sorted({_sm(capability) for _, capability in cards}))
    if all(runs):
        return Check(check, title, PASS, " ".join(arch_list), expected)
    unsupported = [card for card, supported in zip(cards, runs, strict=True) if not supported]
    named = ", ".join(f"{name} ({_sm(capability)})" for name, capability in unsupported)
    found = f"none for {named}: only {' '.join(arch_list)}"
    if runs[0]:  # training uses the first card by default
        numbers = ",".join(str(index) for index, supported in enumerate(runs) if supported)
        remedy = remedies.set_variable(facts, "CUDA_VISIBLE_DEVICES", numbers)
        return Check(check, title, WARN, found, expected, remedy)
    return Check(check, title, FAIL, found, expected, remedies.suitable_build(facts))


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


def _bf16(facts: Facts) -> Check:
    check, title, expected = "card.bf16", "bf16", "compute capability 8.0 or newer (RTX 30)"
    cards = remedies.capabilities(facts)
    if not cards:
        return _cpu_bf16(facts)
    old = [name for name, capability in cards if capability < BF16_CAPABILITY]
    if not old:
        return Check(check, title, PASS, "in hardware", expected)
    found = f"{', '.join(old)} computes bf16 slowly or not at all"
    remedy = "train with --mixed_precision without --use_bf16: it uses fp16 there"
    return Check(check, title, WARN, found, expected, remedy)


def _cpu_bf16(facts: Facts) -> Check:
    """What --mixed_precision selects on a machine without a card."""
    check, title, support = "card.bf16", "bf16", facts.loaded.cpu_bf16 if facts.loaded else None
    if support is None:
        return Check(check, title, SKIP, "no card")
    if support == "native":
        return Check(check, title, PASS, "in hardware, on the CPU: --mixed_precision uses bf16")
    return Check(check, title, PASS, "no bf16 instructions in the CPU: --mixed_precision uses fp32")


def _same(facts: Facts) -> Check:
    check, title = "card.same", "Identical cards"
    names = [c.name for c in _devices(facts)] or [c.name for c in facts.smi.cards]
    if len(names) < 2:
        return Check(check, title, SKIP, "one card or none")
    if len(set(names)) == 1:
        return Check(check, title, PASS, f"{len(names)} x {names[0]}", "identical cards")
    found = ", ".join(names) + ": training uses the first; together they run at the speed of the slowest"
    remedy = f"to choose one: {remedies.set_variable(facts, 'CUDA_DEVICE_ORDER', 'PCI_BUS_ID')}, then "
    remedy += f"{remedies.set_variable(facts, 'CUDA_VISIBLE_DEVICES', '0')} with its number in nvidia-smi"
    return Check(check, title, WARN, found, "identical cards", remedy)


def _profile(facts: Facts) -> Check:
    check, title = "card.profile", "Speed settings"
    sizes = [(card.name, card.memory_total / GIB) for card in _devices(facts)]
    sizes = sizes or [(c.name, c.memory_total_mib / 1024) for c in facts.smi.cards if c.memory_total_mib]
    if not sizes:
        return Check(check, title, SKIP, "no card")
    name, gib = sizes[0]
    known = match_card(name, gib)
    found = f"{name} has none of its own: based on its {gib:.1f} GiB"
    if known is not None and known.settings:
        found = f"those of the {known.name}"
    return Check(check, title, PASS, found)


def _segments(facts: Facts) -> Check:
    """Whether PyTorch allocates memory in segments that grow, which the memory plan assumes."""
    check, title, host = "card.segments", "Memory segments", facts.host
    if facts.loaded is None or facts.loaded.growing_segments is None:
        return Check(check, title, SKIP, "no card, or PyTorch did not get as far")
    if facts.loaded.growing_segments:
        return Check(check, title, PASS, "they grow", GROWING_SEGMENTS)
    cost = "PyTorch reserves up to a sixth more memory, and images of 4096 px do not fit 32 GB"
    if not growing_segments_supported(host.system, host.release):
        system = "Windows" if host.system == "Windows" else "WSL"
        found = f"they do not grow: PyTorch does not support that on {system}; {cost}"
        return Check(check, title, PASS, found)
    own = {name: host.variables[name] for name in ALLOCATOR_VARIABLES if name in host.variables}
    if GROWING_SEGMENTS in own.values():
        found = f"the driver refuses segments that grow: {cost}"
        return Check(check, title, WARN, found, GROWING_SEGMENTS, remedies.update_driver(facts))
    name, value = next(iter(own.items()), (ALLOCATOR_VARIABLES[0], "not set"))
    found = f"they do not grow ({name}: {value}): {cost}"
    return Check(check, title, WARN, found, GROWING_SEGMENTS, f"unset {' '.join(own) or name}")


# --- values from nvidia-smi, one check over all cards ------------------------------------------------------


def _each(
    facts: Facts, check: str, title: str, expected: str, judge: Callable[[SmiCard], Verdict | None]
) -> Check:
    """One check over all cards; `judge` returns the verdict on one card, or None if its value is unknown."""
    if not facts.smi.cards:
        return Check(check, title, SKIP, "nvidia-smi lists no card")
    verdicts = [(card, judge(card)) for card in facts.smi.cards]
    known = [(card, verdict) for card, verdict in verdicts if verdict]
    if not known:
        return Check(check, title, SKIP, "not reported by this card")
    statuses = [verdict[0] for _, verdict in known]
    status = next(s for s in (FAIL, WARN, PASS) if s in statuses)
    several = len(facts.smi.cards) > 1
    found = "; ".join(f"{card.index}: {verdict[1]}" if several else verdict[1] for card, verdict in known)
    remedy = next((verdict[2] for _, verdict in known if verdict[0] == status), "")
    return Check(check, title, status, found, expected, remedy)


def _memory(facts: Facts) -> Check:
    def judge(card: SmiCard) -> Verdict | None:
        if card.memory_used_mib is None or not card.memory_total_mib:
            return None
        used, total = card.memory_used_mib / 1024, card.memory_total_mib / 1024
        found = f"{used:.1f} of {total:.1f} GiB in use"
        if used <= MAX_USED_SHARE * total:
            return PASS, found, ""
        return (
            WARN,
            f"{found} by other programs",
            "end the processes that you do not need: nvidia-smi lists them",
        )

    return _each(facts, "card.memory", "Memory in use", "at most a tenth", judge)


def _pcie(facts: Facts) -> Check:
    def judge(card: SmiCard) -> Verdict | None:
        if not (card.pcie_width and card.pcie_width_max):
            return None
        generation = f"generation {card.pcie_generation} of {card.pcie_generation_max}"
        found = f"x{card.pcie_width} of x{card.pcie_width_max}, {generation} now"
        if card.pcie_width >= card.pcie_width_max:
            return PASS, found, ""
        remedy = "use the mainboard's x16 slot, and check for other slots that share its lanes"
        return WARN, found, remedy

    return _each(facts, "card.pcie", "PCIe", "all lanes; the generation drops while the card idles", judge)


def _power(facts: Facts) -> Check:
    def judge(card: SmiCard) -> Verdict | None:
        if card.power_limit_w is None:
            return None
        found = f"limit {card.power_limit_w:.0f} W"
        if card.power_default_w is not None:
            found += f", default {card.power_default_w:.0f} W"
        if card.power_draw_w is not None:
            found += f", drawing {card.power_draw_w:.0f} W now"
        return PASS, found, ""  # a lower limit is the owner's choice

    return _each(facts, "card.power", "Power", "information only", judge)


def _clocks(facts: Facts) -> Check:
    def judge(card: SmiCard) -> Verdict | None:
        if card.clock_reasons is None:
            return None
        reasons = [text for bit, text in CLOCK_REASONS.items() if card.clock_reasons & bit]
        if not reasons:
            return PASS, "not reduced", ""
        remedy = "check fans, case airflow and power cables; nvidia-smi -q -d PERFORMANCE shows the reasons"
        return WARN, ", ".join(reasons), remedy

    return _each(facts, "card.clocks", "Clocks", "no slowdown", judge)


def _temperature(facts: Facts) -> Check:
    def judge(card: SmiCard) -> Verdict | None:
        return None if card.temperature_c is None else (PASS, f"{card.temperature_c} C now", "")

    return _each(facts, "card.temperature", "Temperature", "information only: see Clocks", judge)
