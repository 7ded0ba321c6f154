//! A few layers by hand, with taps: what a port in Rust adds to its own code.
//!
//!     rustc --edition 2021 demo.rs && LYDITE_TRACE=run ./demo
mod trace;
use trace::tap;

fn main() {
    selftest();
    let weight: Vec<f32> = (0..12).map(|i| (i as f32 - 5.5) / 8.0).collect(); // 4 outputs, 3 inputs
    for step in 0..2 {
        trace::set_step(step);
        let x: Vec<f32> = (0..6).map(|i| (i + step) as f32 / 4.0).collect(); // 2 rows of 3
        let x = tap("model/input", "f32", &x, &[2, 3], &[]);
        // the weight turned round without moving it: 3 × 4, one step right is three values on
        let turned = tap("model/weight_t", "f32", &weight, &[3, 4], &[1, 3]);
        let product = tap("model/linear", "f32", &multiply(&x, &turned, 3, 4), &[2, 4], &[]);
        let gated: Vec<f32> = product.iter().map(|v| v / (1.0 + (-v).exp())).collect();
        let gated = tap("model/silu", "f32", &gated, &[2, 4], &[]);
        tap("model/sum", "f32", &[gated.iter().sum::<f32>()], &[], &[]);
    }
    trace::header(true);
}

fn multiply(x: &[f32], y: &[f32], inner: usize, columns: usize) -> Vec<f32> {
    let cell = |row: usize, column: usize| -> f32 {
        (0..inner).map(|k| x[row * inner + k] * y[k * columns + column]).sum()
    };
    (0..x.len() / inner * columns).map(|i| cell(i / columns, i % columns)).collect()
}

/// The format's self-test. A port with its own tensor type makes these with that type's views.
fn selftest() {
    let a: Vec<f32> = (0..24).map(|i| i as f32).collect();
    tap("selftest/contiguous", "f32", &a, &[2, 3, 4], &[]);
    tap("selftest/transposed", "f32", &a, &[4, 2, 3], &[1, 12, 4]);
    tap("selftest/sliced", "f32", &a[1..], &[2, 2, 2], &[12, 8, 2]);
    tap("selftest/broadcast", "f32", &a, &[3, 4], &[0, 1]);
    let special = [f32::NAN, f32::INFINITY, -f32::INFINITY, -0.0, 1e-40, 1.0, -1.0, 65504.0];
    tap("selftest/special", "f32", &special, &[8], &[]);
    tap("selftest/f32", "f32", &[0f32, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], &[8], &[]);
    tap("selftest/f64", "f64", &[0f64, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], &[8], &[]);
    tap("selftest/i64", "i64", &[0i64, 1, 2, 3, 4, 5, 6, 7], &[8], &[]);
    tap("selftest/i32", "i32", &[0i32, 1, 2, 3, 4, 5, 6, 7], &[8], &[]);
    tap("selftest/u8", "u8", &[0u8, 1, 2, 3, 4, 5, 6, 7], &[8], &[]);
    tap("selftest/bool", "bool", &[false, true, true, true, true, true, true, true], &[8], &[]);
    let bf16: Vec<u16> = (0..8).map(|i| ((i as f32).to_bits() >> 16) as u16).collect();
    tap("selftest/bf16", "bf16", &bf16, &[8], &[]);
    let f16 = [0u16, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700];
    tap("selftest/f16", "f16", &f16, &[8], &[]);
}
