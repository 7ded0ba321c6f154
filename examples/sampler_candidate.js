// Euler's method in JavaScript, fed through `lydite sampler conform`: put your own loop in its place.
//
//     lydite sampler conform --write problem.json --sampler euler --guidance 3
//     node sampler_candidate.js problem.json answer.json
//     lydite sampler conform problem.json answer.json
//
// For eps, v and flow predictions of gaussian or mixture data.
const fs = require("fs");

const [problem, answer] = process.argv.slice(2);
const p = JSON.parse(fs.readFileSync(problem));
const logs = p.table.map(Math.log);
let x = Float32Array.from(p.x);
const steps = [];
for (let i = 0; i < p.timesteps.length; i++) {
  const sigma = p.sigmas[i], after = p.sigmas[i + 1];
  const [cIn, cSkip, cOut] = scalings(sigma);
  x = x.map((value) => {
    let f = network(p.denoiser, value * cIn, p.timesteps[i]);
    if (p.guidance) {
      const uncond = network(p.guidance.uncond, value * cIn, p.timesteps[i]);
      f = uncond + p.guidance.scale * (f - uncond);
    }
    const denoised = cSkip * value + cOut * f;
    return value + ((value - denoised) / sigma) * (after - sigma);
  });
  steps.push(Array.from(x)); // after each step
}
fs.writeFileSync(answer, JSON.stringify({ x: steps }));

// The denoised is cSkip x + cOut F(cIn x, t).
function scalings(sigma) {
  const root = Math.sqrt(sigma * sigma + 1);
  if (p.prediction === "eps") return [1 / root, 1, -sigma];
  if (p.prediction === "v") return [1 / root, 1 / root ** 2, -sigma / root];
  if (p.prediction === "flow") return [1, 1, -sigma];
  throw new Error(`prediction ${p.prediction}`);
}

// Stands for a real one; in words: words.network of the problem.
function network(kind, u, t) {
  const sigma = p.prediction === "flow" ? Math.max(t / p.training_steps, 1e-4) : Math.exp(log(t));
  const [cIn, cSkip, cOut] = scalings(sigma);
  const v = u / cIn;
  const a = p.law === "flow" ? 1 - sigma : 1;
  const width = (kind.spread * a) ** 2 + sigma ** 2;
  const logits = kind.means.map((m) => -((v - a * m) ** 2) / (2 * width));
  const odds = logits.map((each) => Math.exp(each - Math.max(...logits)));
  const total = odds.reduce((sum, each) => sum + each, 0);
  const image = (m) => (kind.spread ** 2 * a * v + sigma ** 2 * m) / width;
  const denoised = odds.reduce((sum, each, k) => sum + each * image(kind.means[k]), 0) / total;
  return (denoised - cSkip * v) / cOut;
}

function log(t) {
  const at = Math.min(Math.max(t, 0), logs.length - 1);
  const i = Math.min(Math.floor(at), logs.length - 2);
  return logs[i] + (at - i) * (logs[i + 1] - logs[i]);
}
