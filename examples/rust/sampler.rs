//! Euler's method in Rust, fed through `lydite sampler conform`: put your own loop in its place.
//!
//!     lydite sampler conform --write problem.json --sampler euler
//!     rustc --edition 2021 -O sampler.rs && LYDITE_TRACE=run ./sampler problem.json
//!     lydite sampler conform problem.json run
//!
//! For eps and flow predictions of mixture or gaussian data without guidance.
mod trace;

fn main() {
    let path = std::env::args().nth(1).expect("usage: sampler PROBLEM");
    let text = std::fs::read_to_string(path).expect("the problem");
    let (sigmas, timesteps) = (numbers(&text, "sigmas"), numbers(&text, "timesteps"));
    let (table, flow) = (numbers(&text, "table"), text.contains("\"prediction\": \"flow\""));
    let (means, spread) = (numbers(&text, "means"), numbers(&text, "spread")[0]);
    let shape: Vec<usize> = numbers(&text, "shape").iter().map(|n| *n as usize).collect();
    let mut x: Vec<f32> = numbers(&text, "x").iter().map(|v| *v as f32).collect();
    for i in 0..timesteps.len() {
        trace::set_step(i);
        let (sigma, after) = (sigmas[i], sigmas[i + 1]);
        let c_in = if flow { 1.0 } else { 1.0 / (sigma * sigma + 1.0).sqrt() };
        for value in x.iter_mut() {
            let f = network(*value as f64 * c_in, timesteps[i], &table, flow, &means, spread);
            let denoised = *value as f64 - sigma * f;
            *value += ((*value as f64 - denoised) / sigma * (after - sigma)) as f32;
        }
        trace::tap("sampler/x", "f32", &x, &shape, &[]);
    }
    trace::header(true);
}

/// Stands for a real one; in words: `words.network` of the problem.
fn network(u: f64, t: f64, table: &[f64], flow: bool, means: &[f64], s: f64) -> f64 {
    let at = (t.floor() as usize).min(table.len().saturating_sub(2));
    let log = |i: usize| table[i].ln();
    let between = |i: usize| log(i) + (t - i as f64) * (log(i + 1) - log(i));
    let sigma = if flow { (t / 1000.0).max(1e-4) } else { between(at).exp() };
    let (x, a) = if flow { (u, 1.0 - sigma) } else { (u * (sigma * sigma + 1.0).sqrt(), 1.0) };
    let width = s * s * a * a + sigma * sigma;
    let odds = |m: f64| (-(x - a * m) * (x - a * m) / (2.0 * width)).exp() + f64::MIN_POSITIVE;
    let image = |m: f64| (s * s * a * x + sigma * sigma * m) / width;
    let total: f64 = means.iter().map(|m| odds(*m)).sum();
    let denoised: f64 = means.iter().map(|m| odds(*m) * image(*m)).sum::<f64>() / total;
    (x - denoised) / sigma
}

/// The numbers of the first field of that name; a JSON library would do as well.
fn numbers(json: &str, key: &str) -> Vec<f64> {
    let rest = json.split_once(&format!("\"{key}\": ")).unwrap_or_else(|| panic!("no {key}")).1;
    let end = rest.find(if rest.starts_with('[') { ']' } else { '}' }).expect(key);
    let items = rest[..end].trim_start_matches('[').split(',');
    items.filter_map(|item| item.trim().parse().ok()).collect()
}
