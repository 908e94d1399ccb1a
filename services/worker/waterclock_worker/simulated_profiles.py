"""What the simulated engine imitates: GPUs and models as a few integers.

The presets are **derived, not measured**: arithmetic on published data sheets and model
configurations, with the assumptions named below. They give latencies of the right size and
the right shape (what grows with the batch, with the prompt, with the context). They are no
statement about what a given GPU does with a given vLLM.

Sources:

* A10G: NVIDIA A10G data sheet: 24 GB, 600 GB/s, 70 TFLOPS dense BF16.
* H200 SXM: NVIDIA H200 data sheet: 141 GB, 4.8 TB/s, 1,979 TFLOPS BF16 and 3,958 FP8 "with
  sparsity", so half of each dense.
* Llama 3.2 1B, 3.1 8B and 3.1 70B: parameters from the model cards; layers, KV heads and head
  size from their ``config.json``.

Assumptions: 80 % of the memory bandwidth is reached in decoding (a published vLLM sweep of the
8B model on an A100 reports 77 %, johnmusgrave.com/p/vllm-throughput-latency-sweep-on) and 50 % of
the arithmetic peak in prefill; 90 % of the memory is used, of which 1.5 GB go to activations and
graphs; half a millisecond a step and ten microseconds a sequence go to the host's scheduling and
sampling. The arithmetic of attention (quadratic in the prompt) is left out: at 8,192 tokens of
context it would add about an eighth to the prefill of the 8B model.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct

BANDWIDTH_REACHED_PERMILLE = 800
FLOPS_REACHED_PERMILLE = 500
MEMORY_USED_PERMILLE = 900
ACTIVATION_BYTES = 1_500_000_000
STEP_NS = 500_000
SEQUENCE_NS = 10_000
KV_BLOCK_TOKENS = 16
"""vLLM's block size on CUDA."""


class Gpu(Struct, frozen=True, kw_only=True):
    memory_bytes: int
    bytes_per_us: int
    """Memory bandwidth: 600 GB/s are 600,000 bytes a microsecond."""
    flops_per_us: int
    """Dense arithmetic at the precision of the weights."""


class Model(Struct, frozen=True, kw_only=True):
    name: str
    parameters: int
    parameter_bytes: int
    layers: int
    kv_heads: int
    head_size: int

    @property
    def weight_bytes(self) -> int:
        return self.parameters * self.parameter_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Key and value, 16 bits each, in every layer."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2


class GpuProfile(Struct, frozen=True, kw_only=True):
    """How long a step takes, and what fits.

    A step over ``sequences`` jobs that computes ``tokens`` tokens (prefill and decode together)
    and reads ``kv_tokens`` tokens of context takes::

        step_ns + max(weights_ns, token_ns * tokens)
                + sequence_ns * sequences + kv_token_ns * kv_tokens

    give or take ``jitter_permille``. The maximum is the roofline: weights stream in while the
    arithmetic runs, so decoding a few sequences costs as much as decoding one.
    """

    name: str
    model: str
    sequences_max: int
    """vLLM's ``max_num_seqs``."""
    batch_tokens_max: int
    """vLLM's ``max_num_batched_tokens``: what one step may compute."""
    context_tokens_max: int
    """vLLM's ``max_model_len``."""
    kv_blocks: int
    kv_block_tokens: int = KV_BLOCK_TOKENS
    step_ns: int = 0
    weights_ns: int = 0
    token_ns: int = 0
    sequence_ns: int = 0
    kv_token_ns: int = 0
    jitter_permille: int = 0
    """A step is longer or shorter by at most this share, evenly spread."""
    draft_tokens: int = 0
    """Speculation: drafts verified with each decoded token; 0 is none, not switchable."""
    draft_accept_permille: int = 0
    """Chance of each draft to be right, given that those before it were."""
    prefix_cache: bool = True
    reports_scheduled: bool = True
    output_tokens_median: int = 128
    """Median of the answers' lengths where a job does not fix its own. Half of the sampled
    lengths are longer, up to thirteen times as long (see ``simulated_text``)."""

    def __post_init__(self) -> None:
        ones = (self.sequences_max, self.batch_tokens_max, self.kv_blocks, self.kv_block_tokens)
        if min(ones) < 1 or self.output_tokens_median < 1:
            raise ValueError(f"profile {self.name}: sizes must be at least 1, found {ones}")
        if self.context_tokens_max < 2:
            raise ValueError(f"profile {self.name}: a context holds at least 2 tokens")
        if self.kv_blocks * self.kv_block_tokens < self.context_tokens_max:
            # Preempting can only make room for the oldest job if that one fits alone.
            raise ValueError(
                f"profile {self.name}: KV of {self.kv_blocks} blocks of {self.kv_block_tokens} "
                f"tokens is smaller than one context of {self.context_tokens_max}; enlarge it"
            )
        times = (
            self.step_ns,
            self.weights_ns,
            self.token_ns,
            self.sequence_ns,
            self.kv_token_ns,
            self.draft_tokens,
        )
        shares = (self.jitter_permille, self.draft_accept_permille)
        if min(times) < 0 or min(shares) < 0 or max(shares) > 1000:
            raise ValueError(
                f"profile {self.name}: times must not be negative and shares must lie in "
                f"0..1000, found {times} and {shares}"
            )

    @property
    def is_instant(self) -> bool:
        return not (
            self.step_ns or self.weights_ns or self.token_ns or self.sequence_ns or self.kv_token_ns
        )


def derive(
    name: str,
    gpu: Gpu,
    model: Model,
    *,
    sequences_max: int,
    batch_tokens_max: int,
    context_tokens_max: int,
) -> GpuProfile:
    """Roofline arithmetic: bytes over bandwidth, and 2 FLOP a parameter and token."""
    bandwidth = gpu.bytes_per_us * BANDWIDTH_REACHED_PERMILLE // 1000
    flops = gpu.flops_per_us * FLOPS_REACHED_PERMILLE // 1000
    kv_bytes = (
        gpu.memory_bytes * MEMORY_USED_PERMILLE // 1000 - ACTIVATION_BYTES - model.weight_bytes
    )
    return GpuProfile(
        name=name,
        model=model.name,
        sequences_max=sequences_max,
        batch_tokens_max=batch_tokens_max,
        context_tokens_max=context_tokens_max,
        kv_blocks=kv_bytes // (model.kv_bytes_per_token * KV_BLOCK_TOKENS),
        step_ns=STEP_NS,
        weights_ns=1000 * model.weight_bytes // bandwidth,
        token_ns=1000 * 2 * model.parameters // flops,
        sequence_ns=SEQUENCE_NS,
        kv_token_ns=1000 * model.kv_bytes_per_token // bandwidth,
        jitter_permille=50,
    )


A10G = Gpu(memory_bytes=24_000_000_000, bytes_per_us=600_000, flops_per_us=70_000_000)
H200_BF16 = Gpu(memory_bytes=141_000_000_000, bytes_per_us=4_800_000, flops_per_us=989_000_000)
H200_FP8 = Gpu(memory_bytes=141_000_000_000, bytes_per_us=4_800_000, flops_per_us=1_979_000_000)

LLAMA_1B = Model(
    name="llama-3.2-1b",
    parameters=1_236_000_000,
    parameter_bytes=2,
    layers=16,
    kv_heads=8,
    head_size=64,
)
LLAMA_8B = Model(
    name="llama-3.1-8b",
    parameters=8_030_000_000,
    parameter_bytes=2,
    layers=32,
    kv_heads=8,
    head_size=128,
)
LLAMA_70B_FP8 = Model(
    name="llama-3.1-70b-fp8",
    parameters=70_554_000_000,
    parameter_bytes=1,
    layers=80,
    kv_heads=8,
    head_size=128,
)

INSTANT = GpuProfile(
    name="instant",
    model="instant",
    sequences_max=4096,
    batch_tokens_max=1 << 24,
    context_tokens_max=1 << 20,
    kv_blocks=1 << 24,
    prefix_cache=False,
    reports_scheduled=False,
    output_tokens_median=16,
)
"""Steps take no time: what remains is the cost of everything around the engine."""

PROFILES: Mapping[str, GpuProfile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            INSTANT,
            # The class of GPU and the batch that a 300 ms objective is often quoted for. One
            # step of decoding takes 34 ms, a prefill of 2,048 tokens 0.94 s.
            derive(
                "a10g-8b",
                A10G,
                LLAMA_8B,
                sequences_max=8,
                batch_tokens_max=2048,
                context_tokens_max=8192,
            ),
            # What a10g-8b falls back to: 5.7 ms a step.
            derive(
                "a10g-1b",
                A10G,
                LLAMA_1B,
                sequences_max=32,
                batch_tokens_max=2048,
                context_tokens_max=8192,
            ),
            # 4.7 ms a step, 0.27 s for a prefill of 8,192 tokens.
            derive(
                "h200-8b",
                H200_BF16,
                LLAMA_8B,
                sequences_max=256,
                batch_tokens_max=8192,
                context_tokens_max=32_768,
            ),
            # The same GPU for long contexts: as in the Mooncake traces, up to 125,000 tokens.
            derive(
                "h200-8b-128k",
                H200_BF16,
                LLAMA_8B,
                sequences_max=128,
                batch_tokens_max=8192,
                context_tokens_max=131_072,
            ),
            # 19 ms a step, and h200-8b to fall back to.
            derive(
                "h200-70b",
                H200_FP8,
                LLAMA_70B_FP8,
                sequences_max=64,
                batch_tokens_max=8192,
                context_tokens_max=32_768,
            ),
        )
    }
)
