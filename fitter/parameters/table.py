"""The table of parameters: type, kind, default, struct, names and help of each, declared once. Bytes.

A parameter is one entry of a class below; ``PARAMETERS`` has all by their keyword in Python. Everything that reads or
writes a parameter is derived from its entry: command-line options, keys of ``fitter.toml`` and of markers, JSON,
arguments, formats, llama.cpp's structs and signatures. Each class is a group of keywords of some calls, also for type
checkers.
"""

# no "from __future__ import annotations": the annotations are read at run time, and parsing strings would be slow
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Annotated, Any, Literal, TypedDict

from fitter.parameters import kinds
from fitter.parameters.kinds import Described, Flag, Kind, Layers, Number, Seconds, Share, Size, Texts, Tokens, Whole
from fitter.parameters.targets import PROGRAMS
from fitter.parameters.values import MAX_DEVICES
from fitter.text import MIB

FlashAttn = Literal["auto", "on", "off"]
SplitMode = Literal["none", "layer", "row", "tensor", "auto"]
AnyPath = str | bytes | PathLike[str] | PathLike[bytes]
AnySize = int | str
"""Bytes, or a text such as ``24GiB``."""
AnyTokens = int | str
"""Tokens, or a text such as ``32k``."""

LARGEST = 2**31 - 1
"""The largest number that llama.cpp's programs read."""

MAX_SEQUENCES = 256
"""``LLAMA_MAX_SEQ``: sequences in one context."""

MAX_USERS = 1024
"""Most users at once: four times as many as llama.cpp has sequences."""

MAX_TOKENS = 2**22
"""Most tokens of a context or batch, unless the model was trained for more. llama.cpp allocates some 55 bytes for each
token of a cache, even in a dummy load.
"""

USEFUL_SPEED = 20.0
"""Default of the tokens per second of generation that are useful: several times as fast as one reads. With 10, Llama
3.1 8B on 8 GiB would be Q8_0 at 13 in place of Q6_K at 31.
"""

USEFUL_CONTEXT = 8192
"""Tokens of context that a best file type has, unless the user sets a context or the smallest one (``--fit-ctx``).

Without it, Qwen3 32B on an RTX 3090 is Q5_K_M with 4608 tokens for four slots, not Q4_K_M with 16640."""

MAX_DRAFTED = 64
"""Most tokens drafted at a time: llama.cpp allocates a recurrent state for each, even in a dummy load."""

MAX_IMAGE_TOKENS = 2**14
"""Most tokens of one image: libmtmd measures with an image of that size, and counts its pixels in an ``int``."""

CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q4_0": 2,
    "q4_1": 3,
    "iq4_nl": 20,
    "q5_0": 6,
    "q5_1": 7,
}
"""Types of KV caches in llama.cpp's tools, with ggml's numbers."""

FLASH_ATTN = {"on": 1, "off": 0, "auto": -1}
"""llama.cpp's number for each setting of flash attention."""

_FLASH_ATTN_SPELLINGS = {
    **dict.fromkeys(("enabled", "true", "1"), "on"),
    **dict.fromkeys(("disabled", "false", "0"), "off"),
    "-1": "auto",
}

SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3, "auto": -1}
"""llama.cpp's number for each split mode; ``auto`` is fitter's own."""

LOAD_MODES = {"auto": -1, "none": 0, "mmap": 1, "mlock": 2, "mmap+mlock": 3, "dio": 4}
"""llama.cpp's number for each way to load weights into host memory."""
MAPPED = ("mmap", "mmap+mlock")
"""Load modes that map the file; the meaning of ``auto`` depends on the devices."""
_CONTEXT_TYPES = {"default": 0, "mtp": 1}

LEVERS = {
    "no-op-offload": "devices do not compute with weights on the host: no buffer for them, slower prompts",
    "moe-cache": "a cache on CUDA or ROCm for experts on the host, in llama.cpp b11480 and newer: slower prompts",
    "kv-q8_0": "a KV cache of that type, if llama.cpp then uses flash attention",
    "kv-q4_0": "a KV cache of that type, if llama.cpp then uses flash attention",
    "context": "a context below -c, but not below --fit-ctx",
    "paging": "weights on the host may exceed its memory, and are read from disk again and again",
}
"""Concessions for ``--allow``, in the order in which they are tried, with their effects."""

FORMER_LEVERS = frozenset({"ubatch"})
"""Words for ``--allow`` that had an effect: a fit now chooses the physical batch by itself."""

GOALS = ("time", "resident", "alone")
"""What a fleet is planned for."""
GOAL_HELP = (
    "time: the least seconds of a request, with loads; resident: the most models in memory; alone: each as fast as "
    "alone, in turns."
)
"""The help for them."""

POOLING = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}
"""llama.cpp's number for each way to pool embeddings."""

SPECULATION = ("draft-simple", "draft-mtp", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
"""llama-server's ways to draft tokens that can be planned, in llama.cpp's words."""

DRAFT, DRAFTING, PROJECTOR = "a draft model", "drafting", "a projector"
NEEDS = {
    DRAFT: "name one with -md",
    DRAFTING: "use it with -md or --mtp",
    PROJECTOR: "name one with --mmproj",
    **{way: f"add --spec-type {way}" for way in SPECULATION},
}
"""Subjects of single options, each with the way to have it."""

PROGRAM = "Program (what the plan is for)"
CONTEXT = "Context and batch"
PLACEMENT = "Placement (what you set is kept; the rest is fitted around it)"
SHARED = "Draft models, vision, LoRA (measured too, and given room in the plan)"
DEVICES = "Devices and limits"
SPEED = "Speed (estimated, to choose between plans that fit)"
OUTPUT = "Output"


@dataclass(frozen=True)
class Parameter:
    """A parameter. ``key``, ``field`` and ``case`` are ``name`` if they are empty here.

    Attributes:
        name: Its keyword in Python.
        kind: How its values are read, checked and written.
        hint: Its type in Python.
        group: Name of its class.
        struct: Its place in llama.cpp: the struct ``model`` or ``context``, or ``program`` if only programs know it.
            Empty for fitter's own parameters, and for those of draft models and projectors.
        options: Its command-line options, short ones first, as in llama.cpp. A parameter with a section and
            without a struct has ``--name`` if none are here.
        env: The environment variable that llama.cpp's programs read.
        section: The section of ``--help``; its class's if it is empty here.
        help: The text of ``--help``.
        unset: The effect without it.
        key: Its name among the parameters of a load and in JSON; ``None`` if it becomes another parameter's value.
        field: Its name in llama.cpp's struct.
        case: Its name in ``fitter.toml`` and in markers; ``None`` if it is not allowed there.
        is_always: Whether a plan's arguments include it even with its ``default``.
        is_planned: Whether a plan's JSON includes it.
        is_ours: Whether llama.cpp's programs lack the option.
        brief: Its line in a short ``--help``; empty if only ``--help-all`` lists it.
        is_keyword_of_llama: Whether ``llama_cpp.Llama`` has a keyword of this name.
        needs: Its subject if it makes no sense without one of ``NEEDS``.
    """

    kind: Kind
    default: Any = None
    struct: Literal["model", "context", "program", ""] = ""
    options: tuple[str, ...] = ()
    env: str | None = None
    section: str = ""
    help: str = ""
    unset: str = ""
    key: str | None = ""
    field: str = ""
    case: str | None = ""
    is_always: bool = False
    is_planned: bool = True
    is_ours: bool = False
    brief: str = ""
    is_keyword_of_llama: bool = False
    needs: str = ""
    name: str = ""
    hint: Any = None
    group: str = "LoadKeywords"

    def __post_init__(self) -> None:
        if self.name:
            if self.section and not (self.options or self.struct):
                object.__setattr__(self, "options", ("--" + self.name.replace("_", "-"),))
            for other, value in (("key", self.key), ("case", self.case), ("field", self.field)):
                if value == "":
                    object.__setattr__(self, other, (self.key or self.name) if other == "field" else self.name)

    @property
    def called(self) -> str:
        """The name and its first option, for messages: ``n_ctx (-c)``."""
        return f"{self.name} ({self.options[0]})" if self.options else self.name

    @property
    def positive(self) -> tuple[str, ...]:
        """Options that set a value, or turn it on."""
        return tuple(name.partition("/")[0] for name in self.options)

    @property
    def negative(self) -> tuple[str, ...]:
        """Options that turn it off."""
        return tuple(off for name in self.options if (off := name.partition("/")[2]))

    @property
    def option(self) -> str:
        """The option in a plan's arguments for a value other than the default."""
        return (self.negative if self.default is True and self.negative else self.positive)[0]

    @property
    def long(self) -> str:
        """The first long option without dashes: its key in llama-server's presets."""
        return next(name for name in self.positive if name.startswith("--"))[2:]

    @property
    def native(self) -> bool:
        """Whether one of llama.cpp's structs has a field for it."""
        return self.struct in ("model", "context") and self.key is not None

    @property
    def default_text(self) -> str:
        """``[default: ...]`` for the help; empty without one."""
        text = self.unset
        if not text and self.default not in (None, ()) and not isinstance(self.default, bool):
            text = self.kind.word(self.default)
        return f"[default: {text}]" if text else ""

    @property
    def text(self) -> str:
        """The help, with the default."""
        return " ".join(filter(None, (self.help, self.default_text)))

    def check(self, value: Any) -> Any:
        """Convert a value from Python to fitter's. Raises ``UsageError``."""
        return self.kind.check(self.called, value)


def _tokens_of(way: str, usual: int) -> Parameter:
    """Declare the tokens that a way to draft without a model drafts at a time."""
    kind, text = Tokens(least=1, most=1024), f"Tokens that {way} drafts at a time."
    return Parameter(kind, section=SHARED, help=text, unset=str(usual), needs=way)


class MachineKeywords(TypedDict, total=False):
    """Devices to plan with, and how long to wait for them."""

    gpus: Annotated[
        str | Described | Sequence[str | Described] | None,
        Parameter(
            kinds.Gpus("SPEC"),
            (),
            options=("--gpu",),
            is_ours=True,
            case="gpu",
            help="Plan for this GPU instead of this machine's devices; you do not need to have it. Such as rtx-4090, "
            "2x rtx-3090, 24GiB, rtx-4090:free=20GiB, cuda:8.9:24564MiB, rocm:gfx1100:24GiB, vulkan:24GiB, metal:64GiB "
            "(all of a Mac's memory), strix-halo:128GiB (all of the machine's), or none for a machine without a GPU. "
            "Repeatable.",
            brief="A GPU to plan for, such as rtx-4090 or 24GiB.",
        ),
    ]
    profile: Annotated[
        str | None,
        Parameter(
            Kind("library[:DIR]|cuda"),
            is_ours=True,
            help="Simulate the NVIDIA cards of --gpu with the libggml-cuda.so of the llama.cpp that is planned with "
            "(library) or of a directory (library:DIR), or by fitter's own rules (cuda). No GPU is needed.",
            unset="library where there is one, else cuda",
        ),
    ]
    llama_cpp: Annotated[
        AnyPath | None,
        Parameter(
            kinds.Build("WHERE"),
            env="FITTER_LLAMA_CPP",
            is_ours=True,
            help="The llama.cpp to plan with, which should be the one that will run the model: a llama-server, a "
            "directory with libllama and ggml's libraries, or python for that of the installed llama-cpp-python, or "
            "else of fitter's wheel.",
            unset="python",
            brief="The llama.cpp that will run the model.",
        ),
    ]
    rpc: Annotated[
        str | Sequence[str] | None,
        Parameter(
            Texts("HOST:PORT,..."),
            (),
            env="LLAMA_ARG_RPC",
            case=None,
            help="Also use the devices of these rpc-servers, listed before all others. Only for trusted networks. "
            "Repeatable.",
        ),
    ]
    timeout: Annotated[
        float | None,
        Parameter(
            Seconds("SECONDS"),
            120.0,
            is_ours=True,
            case=None,
            help="Longest wait for a single answer of llama.cpp or an rpc-server, and for a header from elsewhere.",
            unset="120",
        ),
    ]


class LimitsKeywords(TypedDict, total=False):
    """Limits of a fit: memory, context and time."""

    time_limit: Annotated[
        float | None,
        Parameter(
            Seconds("SECONDS"),
            is_ours=True,
            case=None,
            help="Longest time for the whole search. The best plan found by then is confirmed with one more load and "
            "printed.",
            unset="no limit",
        ),
    ]
    host_memory: Annotated[
        AnySize | None,
        Parameter(
            Size("SIZE", least=MIB),
            is_ours=True,
            help="Host memory to plan with, such as 64GiB (KiB, MiB, GiB and TiB count in 1024s; KB, MB, GB and TB in "
            "1000s); of memory that a GPU shares with the host, the most that "
            "the host's own part may take.",
            unset="what is available here; with --gpu unlimited, or what the GPU shares",
            brief="Host memory to plan with, such as 64GiB.",
        ),
    ]
    host_margin: Annotated[
        AnySize | None,
        Parameter(
            Size("MiB", in_mib=True, least=MIB),
            1024 * MIB,
            is_ours=True,
            help="Host memory that must stay free, in MiB or as a size such as 2GiB; of memory that a GPU shares with "
            "the host too.",
            unset="1024",
        ),
    ]
    margin: Annotated[
        AnySize | Sequence[AnySize] | None,
        Parameter(
            kinds.Margin("MiB[,MiB...]", is_list=True, in_mib=True, least=MIB),
            options=("-fitt", "--fit-target"),
            env="LLAMA_ARG_FIT_TARGET",
            help="Memory that must stay free on each device, in MiB or as a size such as 2GiB: one number, or one per "
            "device; or auto, which is what was measured of such devices, or of this one with fitter calibrate, and "
            "512 MiB for the rest.",
            unset="1024, or auto where that is more",
            brief="MiB that stay free on each device.",
        ),
    ]
    fit_ctx: Annotated[
        AnyTokens | None,
        Parameter(
            Tokens(least=1, most=LARGEST),
            4096,
            options=("-fitc", "--fit-ctx"),
            env="LLAMA_ARG_FIT_CTX",
            help="Smallest context that fitting may choose.",
        ),
    ]
    allow: Annotated[
        str | Sequence[str] | None,
        Parameter(
            Texts("LEVERS"),
            (),
            is_ours=True,
            help="What may be given up to make the model fit, or 2 % faster by estimate, such as kv-q8_0,context. "
            + "; ".join(f"{name}: {text}" for name, text in LEVERS.items())
            + ".",
            brief="What may be given up, such as kv-q8_0,context.",
        ),
    ]
    skeleton: Annotated[
        bool | None,
        Parameter(
            Flag(),
            True,
            options=("--skeleton/--no-skeleton",),
            is_ours=True,
            case=None,
            section=OUTPUT,
            help="Load the model's header without its tokenizer, on which no byte depends. llama.cpp reads the "
            "tokenizer apart, once.",
            unset="on",
        ),
    ]


class LoadKeywords(TypedDict, total=False):
    """How llama.cpp's programs load a model, in the order of a plan's arguments."""

    n_ctx: Annotated[
        AnyTokens | None,
        Parameter(
            Tokens(most=LARGEST),
            0,
            "context",
            ("-c", "--ctx-size"),
            "LLAMA_ARG_CTX_SIZE",
            CONTEXT,
            "Context in tokens, such as 32768 or 32k; 0 is the model's own. The default of --prompt follows it.",
            unset="the largest with which the request takes at most --context-cost longer",
            is_always=True,
            is_keyword_of_llama=True,
            brief="Context in tokens; 0 is the model's own.",
        ),
    ]
    devices: Annotated[
        str | Sequence[str] | None,
        Parameter(
            kinds.DeviceNames("DEV0,DEV1,..."),
            None,
            "model",
            ("-dev", "--device"),
            "LLAMA_ARG_DEVICE",
            PLACEMENT,
            "Devices to use, in this order; none for the CPU only.",
            unset="all",
            brief="Devices to use, in this order.",
        ),
    ]
    n_gpu_layers: Annotated[
        int | Literal["auto", "all"] | None,
        Parameter(
            Layers(least=-1),
            -1,
            "model",
            ("-ngl", "--n-gpu-layers", "--gpu-layers"),
            "LLAMA_ARG_N_GPU_LAYERS",
            PLACEMENT,
            "Layers to put on the devices: a number, auto or all.",
            unset="auto",
            is_always=True,
            is_keyword_of_llama=True,
            brief="Layers on the devices: a number, auto or all.",
        ),
    ]
    split_mode: Annotated[
        SplitMode | None,
        Parameter(
            kinds.OneOf("none|layer|tensor|auto", SPLIT_MODES),
            "layer",
            "model",
            ("-sm", "--split-mode"),
            "LLAMA_ARG_SPLIT_MODE",
            PLACEMENT,
            "none: use one device; layer: split the layers over all devices; tensor: split every tensor over them; "
            "auto: layer or tensor, whichever is estimated to be faster.",
            is_keyword_of_llama=True,
        ),
    ]
    main_gpu: Annotated[
        int | None,
        Parameter(
            Whole("INDEX", least=-1, most=MAX_DEVICES - 1),
            0,
            "model",
            ("-mg", "--main-gpu"),
            "LLAMA_ARG_MAIN_GPU",
            PLACEMENT,
            "The device to use with -sm none.",
            unset="0",
            is_keyword_of_llama=True,
        ),
    ]
    tensor_split: Annotated[
        str | Sequence[float] | None,
        Parameter(
            kinds.Shares("N0,N1,..."),
            None,
            "model",
            ("-ts", "--tensor-split"),
            "LLAMA_ARG_TENSOR_SPLIT",
            PLACEMENT,
            "Share of the layers that each device takes, such as 3,1.",
            unset="chosen by the fit",
            is_keyword_of_llama=True,
        ),
    ]
    override_tensor: Annotated[
        str | Sequence[str] | None,
        Parameter(
            kinds.Overrides("PATTERN=TYPE,..."),
            (),
            "model",
            ("-ot", "--override-tensor"),
            "LLAMA_ARG_OVERRIDE_TENSOR",
            PLACEMENT,
            "Put tensors whose name matches a regular expression into a buffer type, such as exps=CPU. Repeatable.",
            key="tensor_buft_overrides",
            brief="Tensors for a buffer type, such as exps=CPU.",
        ),
    ]
    cpu_moe: Annotated[
        bool | None,
        Parameter(
            Flag(),
            False,
            "program",
            ("-cmoe", "--cpu-moe"),
            "LLAMA_ARG_CPU_MOE",
            PLACEMENT,
            "Keep all expert weights of a mixture-of-experts model in host memory.",
            key=None,
        ),
    ]
    n_cpu_moe: Annotated[
        int | None,
        Parameter(
            Whole(),
            None,
            "program",
            ("-ncmoe", "--n-cpu-moe"),
            "LLAMA_ARG_N_CPU_MOE",
            PLACEMENT,
            "Keep the expert weights of the first N layers in host memory.",
            key=None,
        ),
    ]
    n_cpu_ffn: Annotated[
        int | None,
        Parameter(
            Whole(),
            None,
            "program",
            ("-ncffn", "--n-cpu-ffn"),
            "LLAMA_ARG_N_CPU_FFN",
            PLACEMENT,
            "Keep the feed-forward weights of the first N layers, but no experts, in host memory.",
            key=None,
        ),
    ]
    moe_cache_size: Annotated[
        AnySize | None,
        Parameter(
            kinds.MebibyteSize("MiB", in_mib=True, least=MIB),
            0,
            "context",
            ("--moe-cache-mib",),
            "LLAMA_ARG_MOE_CACHE_MIB",
            PLACEMENT,
            "Memory of the devices for a cache of the expert weights that are in host memory; 0 for none. llama.cpp "
            "b11480 and newer have it.",
            unset="0",
        ),
    ]
    n_batch: Annotated[
        AnyTokens | None,
        Parameter(
            Tokens(least=1, most=MAX_TOKENS),
            2048,
            "context",
            ("-b", "--batch-size"),
            "LLAMA_ARG_BATCH",
            CONTEXT,
            "Tokens that a program hands to llama.cpp at a time (logical batch).",
            unset="2048, or more where the fit chooses a larger -ub",
            is_keyword_of_llama=True,
        ),
    ]
    n_ubatch: Annotated[
        AnyTokens | None,
        Parameter(
            Tokens(least=1, most=MAX_TOKENS),
            512,
            "context",
            ("-ub", "--ubatch-size"),
            "LLAMA_ARG_UBATCH",
            CONTEXT,
            "Tokens that are computed at a time (physical batch). More make prompts faster, and need larger buffers.",
            unset="chosen by the fit, 64 to 8192; 512 where nothing is chosen",
            is_keyword_of_llama=True,
        ),
    ]
    type_k: Annotated[
        str | None,
        Parameter(
            kinds.OneOf("TYPE", CACHE_TYPES, is_open=True),
            "f16",
            "context",
            ("-ctk", "--cache-type-k"),
            "LLAMA_ARG_CACHE_TYPE_K",
            CONTEXT,
            f"Type of K in the KV cache: {', '.join(CACHE_TYPES)}.",
            is_keyword_of_llama=True,
            brief="Type of the KV cache's keys, such as q8_0.",
        ),
    ]
    type_v: Annotated[
        str | None,
        Parameter(
            kinds.OneOf("TYPE", CACHE_TYPES, is_open=True),
            "f16",
            "context",
            ("-ctv", "--cache-type-v"),
            "LLAMA_ARG_CACHE_TYPE_V",
            CONTEXT,
            "Type of V in the KV cache; the same types as for K.",
            is_keyword_of_llama=True,
        ),
    ]
    flash_attn: Annotated[
        FlashAttn | None,
        Parameter(
            kinds.OneOf("on|off|auto", FLASH_ATTN, spellings=_FLASH_ATTN_SPELLINGS),
            "auto",
            "context",
            ("-fa", "--flash-attn"),
            "LLAMA_ARG_FLASH_ATTN",
            CONTEXT,
            "Flash attention; auto: if llama.cpp has it for the model on these devices.",
            field="flash_attn_type",
            is_keyword_of_llama=True,
        ),
    ]
    offload_kqv: Annotated[
        bool | None,
        Parameter(
            Flag(),
            True,
            "context",
            ("-kvo/-nkvo", "--kv-offload/--no-kv-offload"),
            "LLAMA_ARG_KV_OFFLOAD",
            PLACEMENT,
            "Keep the KV cache on the devices with its layers, or all of it in host memory.",
            unset="on the devices",
            is_keyword_of_llama=True,
        ),
    ]
    op_offload: Annotated[
        bool | None,
        Parameter(
            Flag(),
            True,
            "context",
            ("--op-offload/--no-op-offload",),
            None,
            PLACEMENT,
            "Let devices compute with weights in host memory on large batches.",
            unset="on",
            is_keyword_of_llama=True,
        ),
    ]
    load_mode: Annotated[
        str | None,
        Parameter(
            kinds.OneOf("|".join(LOAD_MODES), LOAD_MODES),
            "auto",
            "program",
            ("-lm", "--load-mode"),
            "LLAMA_ARG_LOAD_MODE",
            PLACEMENT,
            "How weights get into host memory: mapped from the file (mmap) or read into memory of their own (none), "
            "from which devices copy several times as fast.",
            unset="none where a prompt is faster with it, else llama.cpp's own auto",
        ),
    ]
    swa_full: Annotated[
        bool | None,
        Parameter(
            Flag(),
            False,
            "context",
            ("--swa-full",),
            "LLAMA_ARG_SWA_FULL",
            CONTEXT,
            "Use a KV cache of full size for sliding-window layers.",
            is_keyword_of_llama=True,
        ),
    ]
    embedding: Annotated[
        bool | None,
        Parameter(
            Flag(),
            False,
            "context",
            ("--embedding", "--embeddings"),
            "LLAMA_ARG_EMBEDDINGS",
            CONTEXT,
            "Plan for embeddings: unless set, -b and -ub hold an input as long as the context of a sequence.",
            key="embeddings",
            is_keyword_of_llama=True,
        ),
    ]
    pooling_type: Annotated[
        str | None,
        Parameter(
            kinds.OneOf("|".join(POOLING), {"model": -1, **POOLING}),
            "model",
            "context",
            ("--pooling",),
            "LLAMA_ARG_POOLING",
            CONTEXT,
            "How embeddings are pooled.",
            unset="as the model says",
            is_keyword_of_llama=True,
        ),
    ]
    n_seq_max: Annotated[
        int | None,
        Parameter(
            Whole(least=1, most=MAX_SEQUENCES),
            1,
            "context",
            ("-np", "--parallel"),
            "LLAMA_ARG_N_PARALLEL",
            CONTEXT,
            "Sequences (slots of llama-server) that share the context.",
            unset="1; 4 for llama-server",
            is_always=True,
            brief="Slots of a llama-server.",
        ),
    ]
    kv_unified: Annotated[
        bool | None,
        Parameter(
            Flag(),
            False,
            "context",
            ("-kvu/-no-kvu", "--kv-unified/--no-kv-unified"),
            "LLAMA_ARG_KV_UNIFIED",
            CONTEXT,
            "Use one KV cache for all sequences.",
            unset="one for each",
        ),
    ]
    kv_unified_per_slot: Annotated[
        AnyTokens | None,
        Parameter(
            Tokens(least=1, most=LARGEST),
            None,
            "program",
            ("--kv-unified-per-slot",),
            "LLAMA_ARG_KV_UNIFIED_PER_SLOT",
            CONTEXT,
            "Largest context of one slot of llama-server; without -c, the context has room for all slots.",
        ),
    ]
    lora: Annotated[
        AnyPath | Sequence[AnyPath] | None,
        Parameter(
            kinds.Adapters("FILE,..."),
            (),
            "program",
            ("--lora",),
            None,
            SHARED,
            "Files with LoRA adapters, applied in full. Repeatable.",
        ),
    ]
    lora_scaled: Annotated[
        str | Sequence[str] | None,
        Parameter(
            kinds.ScaledPaths("FILE:SCALE,..."),
            (),
            "program",
            ("--lora-scaled",),
            None,
            SHARED,
            "Files with LoRA adapters, each with the scale that it is applied with. Repeatable.",
            key=None,
        ),
    ]


class ForKeywords(TypedDict, total=False):
    """The program that a plan is for."""

    program: Annotated[
        str | None,
        Parameter(
            kinds.OneOf("PROGRAM", {name: i for i, name in enumerate(PROGRAMS)}),
            options=("--for",),
            env="FITTER_PROGRAM",
            is_ours=True,
            help="The program that will load the model: "
            + "; ".join(f"{name} ({text})" for name, text in PROGRAMS.items())
            + ".",
            unset="llama-server on the command line, llama-cpp-python in Python, any in cases",
            brief="The program that will run the plan.",
        ),
    ]


class ServerKeywords(TypedDict, total=False):
    """Keywords of llama-server and other programs beyond the load."""

    cache_ram: Annotated[
        int | str | None,
        Parameter(
            kinds.Mebibytes("MiB", least=-1, most=LARGEST),
            None,
            "program",
            ("-cram", "--cache-ram"),
            "LLAMA_ARG_CACHE_RAM",
            help="Host memory for llama-server's prompt cache, in MiB or as a size such as 2GiB; 0: none, -1: no "
            "limit.",
            unset="llama-server's own, or what fits",
        ),
    ]
    ctx_checkpoints: Annotated[
        int | None,
        Parameter(
            Whole(most=2**16),
            None,
            "program",
            ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints"),
            "LLAMA_ARG_CTX_CHECKPOINTS",
            help="Context checkpoints that llama-server keeps for each slot in host memory, where the model's memory "
            "cannot be rolled back.",
            unset="llama-server's own, or what fits",
        ),
    ]
    checkpoint_min_step: Annotated[
        AnyTokens | None,
        Parameter(
            Tokens(most=LARGEST),
            None,
            "program",
            ("-cms", "--checkpoint-min-step"),
            "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
            help="Tokens between two context checkpoints at least.",
            unset="llama-server's own",
        ),
    ]
    cache_idle_slots: Annotated[
        bool | None,
        Parameter(
            Flag(),
            True,
            "program",
            ("--cache-idle-slots/--no-cache-idle-slots",),
            "LLAMA_ARG_CACHE_IDLE_SLOTS",
            help="Save idle slots of llama-server in the prompt cache.",
            unset="on",
        ),
    ]
    reranking: Annotated[
        bool | None,
        Parameter(
            Flag(),
            False,
            "program",
            ("--rerank", "--reranking"),
            "LLAMA_ARG_RERANKING",
            help="Plan for reranking: embeddings that are pooled to one number. -b and -ub as with --embedding.",
        ),
    ]
    backend_sampling: Annotated[
        bool | None,
        Parameter(
            Flag(),
            False,
            "program",
            ("-bs", "--backend-sampling"),
            "LLAMA_ARG_BACKEND_SAMPLING",
            help="Sample on the device: more of what is put out is kept in host memory.",
        ),
    ]
    logits_all: Annotated[
        bool | None,
        Parameter(
            Flag(),
            False,
            "program",
            help="Plan for Llama(logits_all=True), or for one with a draft model: an output for every token.",
            is_keyword_of_llama=True,
        ),
    ]
    spec_type: Annotated[
        str | Sequence[str] | None,
        Parameter(
            Texts("TYPE,..."),
            (),
            env="LLAMA_ARG_SPEC_TYPE",
            section=SHARED,
            help=f"How llama-server drafts tokens: {', '.join(SPECULATION)}.",
            unset="draft-simple with -md, draft-mtp with --mtp",
        ),
    ]
    spec_ngram_simple_size_m: Annotated[AnyTokens | None, _tokens_of("ngram-simple", 48)]
    spec_ngram_map_k_size_m: Annotated[AnyTokens | None, _tokens_of("ngram-map-k", 48)]
    spec_ngram_map_k4v_size_m: Annotated[AnyTokens | None, _tokens_of("ngram-map-k4v", 48)]
    spec_ngram_mod_n_max: Annotated[AnyTokens | None, _tokens_of("ngram-mod", 64)]


class RawKeywords(TypedDict, total=False):
    """Parameters without an option, which llama.cpp's programs set themselves. For measurements only."""

    load_mtp: Annotated[
        bool | None,
        Parameter(Flag(), False, "model", help="Load the layers for multi-token prediction.", case=None),
    ]
    n_rs_seq: Annotated[
        int | None,
        Parameter(
            Whole(most=MAX_DRAFTED),
            0,
            "context",
            help="Snapshots of a recurrent state, for drafted tokens that are rejected.",
            unset="0",
            case=None,
        ),
    ]
    n_outputs_max: Annotated[
        AnyTokens | None,
        Parameter(
            Tokens(most=MAX_TOKENS),
            0,
            "context",
            help="Tokens of a batch that get an output; 0 is all.",
            unset="0, or what the program sets",
            case=None,
        ),
    ]


class BesideKeywords(TypedDict, total=False):
    """Models and memory that share the devices."""

    reserve: Annotated[
        str | Mapping[str, AnySize] | Sequence[str] | None,
        Parameter(
            kinds.Reservations("DEVICE=SIZE"),
            (),
            is_ours=True,
            help="Memory to keep free for anything else, such as CUDA0=2GiB or host=8GiB. Repeatable.",
        ),
    ]
    beside: Annotated[
        AnyPath | Sequence[AnyPath] | None,
        Parameter(
            kinds.PlanFiles("FILE"),
            (),
            is_ours=True,
            help="Plan of another model that will run at the same time, a file that --json wrote: its memory stays "
            "free. Repeatable.",
            brief="Plans of other models that run at once.",
        ),
    ]
    model_draft: Annotated[
        AnyPath | None,
        Parameter(
            kinds.Path("FILE"),
            options=("-md", "--model-draft", "--spec-draft-model"),
            env="LLAMA_ARG_SPEC_DRAFT_MODEL",
            help="A file with a draft model. It gets the same context, and the device that makes the best plan.",
            brief="A draft model.",
        ),
    ]
    devices_draft: Annotated[
        str | Sequence[str] | None,
        Parameter(
            kinds.DeviceNames("DEV0,DEV1,..."),
            options=("-devd", "--device-draft", "--spec-draft-device"),
            help="Devices of the draft model; none for the host.",
            unset="chosen by the fit",
            needs=DRAFT,
        ),
    ]
    n_gpu_layers_draft: Annotated[
        int | Literal["auto", "all"] | None,
        Parameter(
            Layers(least=-1),
            options=("-ngld", "--n-gpu-layers-draft", "--gpu-layers-draft", "--spec-draft-ngl"),
            env="LLAMA_ARG_N_GPU_LAYERS_DRAFT",
            help="Layers of the draft model on its devices: a number, auto or all.",
            unset="auto",
            needs=DRAFT,
        ),
    ]
    type_k_draft: Annotated[
        str | None,
        Parameter(
            kinds.OneOf("TYPE", CACHE_TYPES, is_open=True),
            options=("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"),
            env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
            help="Type of K in the KV cache for drafting.",
            unset="f16",
            needs=DRAFTING,
        ),
    ]
    type_v_draft: Annotated[
        str | None,
        Parameter(
            kinds.OneOf("TYPE", CACHE_TYPES, is_open=True),
            options=("-ctvd", "--cache-type-v-draft", "--spec-draft-type-v"),
            env="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
            help="Type of V in the KV cache for drafting.",
            unset="f16",
            needs=DRAFTING,
        ),
    ]
    n_ubatch_draft: Annotated[
        AnyTokens | None,
        Parameter(
            Tokens(least=1, most=MAX_TOKENS),
            options=("--spec-draft-n-ubatch",),
            env="LLAMA_ARG_SPEC_DRAFT_N_UBATCH",
            help="Most tokens of a micro batch of the context for drafting. llama.cpp b11669 and newer have it.",
            unset="as -ub; less where the model then gets more context",
            needs=DRAFTING,
        ),
    ]
    mtp: Annotated[
        bool | None,
        Parameter(
            Flag(),
            False,
            is_ours=True,
            help="Draft with the model's own layers for multi-token prediction.",
        ),
    ]
    acceptance: Annotated[
        float | str | None,
        Parameter(
            Share("SHARE"),
            is_ours=True,
            help="Share of drafted tokens that the model accepts, as llama-server prints it, such as 0.7 or 70%: for "
            "the estimate of drafting.",
            unset="a published one",
            needs=DRAFTING,
        ),
    ]
    draft_max: Annotated[
        AnyTokens | None,
        Parameter(
            Tokens(least=1, most=MAX_DRAFTED),
            options=("--spec-draft-n-max",),
            env="LLAMA_ARG_SPEC_DRAFT_N_MAX",
            help="Tokens that a draft model or --mtp drafts at a time.",
            unset="3",
            needs=DRAFTING,
        ),
    ]
    mmproj: Annotated[
        AnyPath | None,
        Parameter(
            kinds.Path("FILE"),
            options=("--mmproj", "-mm"),
            env="LLAMA_ARG_MMPROJ",
            help="A file with a multimodal projector, which reads images for the model.",
            brief="A projector for images.",
        ),
    ]
    mmproj_device: Annotated[
        str | None,
        Parameter(
            Kind("DEV"),
            options=("-mmdev", "--mmproj-device"),
            env="MTMD_BACKEND_DEVICE",
            help="The device of the projector; none for the host.",
            unset="chosen by the fit",
            needs=PROJECTOR,
        ),
    ]
    image_min_tokens: Annotated[
        AnyTokens | None,
        Parameter(
            Tokens(least=1, most=MAX_IMAGE_TOKENS),
            env="LLAMA_ARG_IMAGE_MIN_TOKENS",
            help="Fewest tokens for an image.",
            unset="the projector's own",
            needs=PROJECTOR,
        ),
    ]
    image_max_tokens: Annotated[
        AnyTokens | None,
        Parameter(
            Tokens(least=1, most=MAX_IMAGE_TOKENS),
            env="LLAMA_ARG_IMAGE_MAX_TOKENS",
            help="Most tokens for an image.",
            unset="the projector's own",
            needs=PROJECTOR,
        ),
    ]


class PricingKeywords(TypedDict, total=False):
    """The request to estimate, and the speeds for it."""

    prompt: Annotated[
        AnyTokens | None,
        Parameter(
            Tokens(least=1, most=LARGEST),
            is_ours=True,
            help="Prompt length, in tokens, to optimize for.",
            unset="2048, or with -c the geometric mean of 2048 and the context of a slot, at most a quarter of it",
        ),
    ]
    generate: Annotated[
        AnyTokens | None,
        Parameter(
            Tokens(least=1, most=LARGEST),
            is_ours=True,
            help="Tokens generated after the prompt, to optimize for.",
            unset="512",
        ),
    ]
    users: Annotated[
        int | None,
        Parameter(
            Whole(least=1, most=MAX_USERS),
            is_ours=True,
            help="Users at once, each with a conversation of its own. Without -np, each gets a slot.",
            unset="1, or as --workload says",
        ),
    ]
    host_bandwidth: Annotated[
        float | str | None,
        Parameter(
            Number("SIZE/s"),
            is_ours=True,
            help="Memory bandwidth of the host, such as 60GB/s.",
            unset="measured once on this machine; with --gpu 40GB/s, or that of memory that the GPU shares",
        ),
    ]
    rpc_bandwidth: Annotated[
        float | str | Sequence[float | str] | None,
        Parameter(
            Number("SIZE/s[,...]", is_list=True),
            is_ours=True,
            case=None,
            section=DEVICES,
            help="Memory bandwidth of remote devices, such as 900GB/s: one value for all, or one for each.",
            unset="measured once",
        ),
    ]


class ChoosingKeywords(TypedDict, total=False):
    """The goal of a plan."""

    workload: Annotated[
        str | None,
        Parameter(
            Kind("WORK"),
            is_ours=True,
            help="The work to optimize for, in place of one request: chat, agent, rag, batch; numbers such as "
            "prompt=12000,reused=90%,answer=300,turns=20,users=4,gap=10s, also after a name; or a log of llama-server.",
            unset="one request of --prompt and --generate tokens",
            brief="agent, chat, rag, batch or numbers; --users for many.",
        ),
    ]
    at_least: Annotated[
        float | None,
        Parameter(
            kinds.Rate("T/S"),
            is_ours=True,
            help="Least tokens per second for each user: the plan says how many users get them.",
            unset="any speed",
        ),
    ]

    objective: Annotated[
        str | None,
        Parameter(
            Kind("OBJECTIVE"),
            "request",
            is_ours=True,
            help="What to optimize: request (prompt and generation together), generation, prompt, or context (the "
            "largest).",
        ),
    ]
    context_cost: Annotated[
        float | str | None,
        Parameter(
            Share("SHARE"),
            0.1,
            is_ours=True,
            help="How much longer the request may take for more context than with the quickest context, such as 10%; "
            "0 for the quickest, none for the largest that fits.",
        ),
    ]
    strategy: Annotated[
        str | None,
        Parameter(
            Kind("STRATEGY"),
            "fastest",
            is_ours=True,
            help="How to place weights: fastest (by estimated time), or llama.cpp (as its own fit does).",
        ),
    ]


class OtherKeywords(TypedDict, total=False):
    """Keywords of a single call."""

    live_tokens: Annotated[
        int | Sequence[int] | None,
        Parameter(
            kinds.TokenCounts(most=LARGEST),
            help="Tokens in the cache while generation is timed.",
            unset="the average of the request",
            case=None,
        ),
    ]
    tolerance: Annotated[
        AnySize | None,
        Parameter(Size("SIZE"), 0, help="How much larger than predicted a byte count may be.", case=None),
    ]
    server: Annotated[
        AnyPath | None,
        Parameter(
            kinds.Path("FILE"),
            help="The llama-server to verify with, or a directory that has one.",
            unset="that of llama_cpp, or the one on the PATH",
            case=None,
        ),
    ]
    prompts: Annotated[
        int | None,
        Parameter(Whole(most=10_000), 40, help="Prompts that a llama-server is sent to verify it.", case=None),
    ]
    twin: Annotated[
        str | None,
        Parameter(Kind("PROFILE"), help="A profile for all virtual twins, such as cuda:8.6.", case=None),
    ]
    store: Annotated[
        bool | None,
        Parameter(Flag(), True, help="Store the measurements, which set the default margin.", case=None),
    ]
    on_progress: Annotated[
        Callable[[Any], None] | None,
        Parameter(kinds.Function(), help="Called at each step with a ``Progress``.", case=None),
    ]
    on_log: Annotated[
        Callable[[str], None] | None,
        Parameter(kinds.Function(), help="Called with every line of llama.cpp's log.", case=None),
    ]
    ctx_type: Annotated[
        str | None,
        Parameter(
            kinds.OneOf(None, _CONTEXT_TYPES),
            "default",
            "context",
            help="Which layers the context computes.",
            case=None,
            is_planned=False,
        ),
    ]


class Measuring(MachineKeywords, LoadKeywords, ForKeywords, RawKeywords, total=False):
    """Keywords of ``measure``."""


class Estimating(MachineKeywords, LoadKeywords, ForKeywords, RawKeywords, PricingKeywords, total=False):
    """Keywords of ``estimate``."""


class Fitting(
    MachineKeywords,
    LimitsKeywords,
    LoadKeywords,
    ForKeywords,
    ServerKeywords,
    BesideKeywords,
    PricingKeywords,
    ChoosingKeywords,
    total=False,
):
    """Keywords of ``fit`` and ``verify``, and keys of a case."""


_GROUPS: dict[Any, str] = {
    MachineKeywords: DEVICES,
    LimitsKeywords: DEVICES,
    LoadKeywords: "",
    ForKeywords: PROGRAM,
    ServerKeywords: PROGRAM,
    RawKeywords: "",
    BesideKeywords: SHARED,
    PricingKeywords: SPEED,
    ChoosingKeywords: SPEED,
    OtherKeywords: "",
}
"""Classes of keywords, each with the section of those that say none."""


def _declared() -> Iterator[Parameter]:
    for group, usual in _GROUPS.items():
        for name, hint in group.__annotations__.items():
            each: Parameter = hint.__metadata__[0]
            section = each.section or usual
            yield replace(each, name=name, hint=hint.__origin__, group=group.__name__, section=section)


PARAMETERS: dict[str, Parameter] = {each.name: each for each in _declared()}
"""Every parameter by its keyword."""

DEFAULTS: dict[str, Any] = {name: each.default for name, each in PARAMETERS.items()}
"""The default of every parameter, by its keyword."""


def taken_by(call: Any) -> tuple[Parameter, ...]:
    """Return the parameters of a call, by the class of its keywords, such as ``Fitting``."""
    names = call.__annotations__.keys()
    groups = {group.__name__ for group in _GROUPS if group.__annotations__.keys() <= names}
    return tuple(each for each in PARAMETERS.values() if each.group in groups)


def of_a_load() -> dict[str, Parameter]:
    """Return the parameters of a load, by their names in ``Params`` and in JSON."""
    return {each.key: each for each in PARAMETERS.values() if each.struct and each.key}


def of_a_struct(struct: str) -> tuple[Parameter, ...]:
    """Return the parameters in one of llama.cpp's structs, ``model`` or ``context``."""
    return tuple(each for each in PARAMETERS.values() if each.struct == struct and each.native)


def of_a_case() -> dict[str, Parameter]:
    """Return the parameters that a case can set, by their keys there."""
    return {each.case: each for each in taken_by(Fitting) if each.case}
