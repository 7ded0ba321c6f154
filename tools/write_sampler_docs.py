"""Write docs/samplers.md from the registry, and draw one prompt with ten samplers beside it.

.venv/bin/python tools/write_sampler_docs.py               the tables
.venv/bin/python tools/write_sampler_docs.py --pictures    docs/samplers.png as well
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lydite.sampling.registry import SAMPLERS, SCHEDULES

DOCS = Path(__file__).parents[1] / "docs"
PROMPT, SEED, STEPS = "a large red star above a small blue ring on white", 7, 8
SHOWN = (
    "euler", "heun", "dpm_2", "dpmpp_2m", "uni_pc", "res_multistep",
    "euler_ancestral", "dpmpp_2m_sde", "er_sde", "euler_cfg_pp",
)  # fmt: skip

HEAD = f"""# Samplers and schedules

Written by `tools/write_sampler_docs.py` from the registries in the code; `lydite sampler list`
prints the same. *Proofs* names what the tests compare a sampler with: a program that is run
(diffusers 0.42.1), the recorded numbers of one (k-diffusion 0.1.1, ComfyUI, A1111), an identity,
the measured order of convergence, or the stationary spread. *Noise* is what a sampler adds: the
next normals of the seed's stream; normals of a Brownian path, which do not depend on the number of
steps; or a stream's, only where `--eta` is above 0.

![One prompt, one seed, ten samplers in {STEPS} steps](samplers.png)

“{PROMPT}”, seed {SEED}, {STEPS} steps on the embedded model.

## Numbers of `lydite generate`

- `--guidance 5` is the weight of the prompt. 1 or less turns guidance off, but for the CFG++
  samplers, whose weight lies between 0 and 1.
- `--guidance 5,5,3,1` is one weight for each step that runs.
- `--guidance-interval 0.2:0.8` guides a part of the steps: of n, counted from 0, those from 0.2·n
  up to 0.8·n. The other steps evaluate the network with the prompt alone, once instead of twice.
- `--guidance-rescale 0.7` goes 0.7 of the way back to the spread of the prediction with the prompt
  alone, on the network's output: Lin et al. (2023), arXiv 2305.08891.
- `--eta 0.5` is the share of fresh noise in each step. Samplers without an eta refuse it.
- `--option s_noise=0.9` is another number of the sampler: s_noise, gamma, curvature, r, rtol, atol.

The PNG remembers all of them, and `--from` restores them.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pictures", action="store_true", help="draw docs/samplers.png too")
    if parser.parse_args().pictures:
        draw(DOCS / "samplers.png")
    (DOCS / "samplers.md").write_text(page(), encoding="utf-8")


def page() -> str:
    samplers = [
        (f"`{each.name}`", each.about, f"{each.order:g}" if each.order else "–", str(each.calls),
         "with eta" if each.noise_with_eta else each.noise, ", ".join(each.noise_models),
         "; ".join(each.proofs), each.source)
        for each in SAMPLERS.values()
    ]  # fmt: skip
    schedules = [
        (f"`{each.name}`", each.about, each.count, ", ".join(each.noise_models),
         "; ".join(each.proofs), each.source)
        for each in SCHEDULES.values()
    ]  # fmt: skip
    heads = (
        "sampler",
        "what it does",
        "order",
        "calls",
        "noise",
        "noise models",
        "proofs",
        "source",
    )
    parts = [HEAD, f"## {len(samplers)} samplers\n", table(heads, samplers)]
    heads = ("schedule", "what it does", "steps from n", "noise models", "proofs", "source")
    return "\n".join([*parts, f"\n## {len(schedules)} schedules\n", table(heads, schedules)]) + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def draw(path: Path) -> None:
    from lydite import embedded
    from lydite.core.request import Request
    from lydite.pipelines.pipeline import Pipeline
    from lydite.report.contact_sheets import Tile, contact_sheet

    pipeline = Pipeline.open(embedded.NAME, dtype="float32")
    tiles: list[Tile] = []
    for name in SHOWN:
        request = Request(PROMPT, steps=STEPS, sampler=name)
        tiles.append(Tile(next(pipeline.generate(request, [SEED])).pixels, name))
    contact_sheet(tiles, columns=5, side=192).save(path, optimize=True)


if __name__ == "__main__":
    main()
