"""Plan a GPU, simulate a day of requests on three allocators, and plot what came of it.

Run with: python examples/plan_capacity.py [OUTPUT.html]
Cells are marked with `# %%`, as notebook editors read them.
"""

# %% What fits on the GPU?
import sys
from pathlib import Path

from pagedkv.config import EngineConfig
from pagedkv.engine.allocators import ALLOCATORS
from pagedkv.plan.planner import Settings, plan_for
from pagedkv.plan.report import write_report
from pagedkv.plan.simulate import Setup, simulate
from pagedkv.plan.steptime import roofline
from pagedkv.plan.synthetic import Synthetic, make_trace

plan = plan_for("llama-3-8b", "a10", Settings(max_seq_len=4096, avg_seq_len=800))
print(f"{plan.pages} pages; {plan.requests(800)} requests of 800 tokens, {plan.contiguous_requests()} reserving 4096")

# %% Requests: bursts of conversations that share eight system prompts
trace = make_trace(
    Synthetic(
        requests=300,
        arrival="gamma",
        rate=4,
        cv=3,
        prompt="uniform:20:600",
        output="uniform:10:300",
        groups=8,
        prefix=256,
        turns=2,
    )
)

# %% The same trace on pages, on reservations, and on rooms that grow
config = EngineConfig(max_batch_size=256, max_num_tokens=2048, max_seq_len=4096)
results = [simulate(trace, Setup(name, plan.room, plan.token_bytes, config), roofline(plan)) for name in ALLOCATORS]
for result in results:
    figures = result.figures()
    print(f"{result.name}: {figures['running_mean']:.1f} at once, waste {figures['waste']:.1%}")

# %% Plots
output = Path(sys.argv[1] if len(sys.argv) > 1 else "capacity.html")
write_report(output, trace, "Llama-3-8B on an A10", [result.name for result in results], results)
print(f"plots: {output}")
