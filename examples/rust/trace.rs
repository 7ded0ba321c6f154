//! Traces for `lydite diff` from Rust: one file, no crate; the format is docs/trace-format.md.
//! LYDITE_TRACE=FOLDER records. LYDITE_INJECT=REFERENCE and LYDITE_INJECT_AT=NAME,PREFIX* hand
//! back the reference's values, which must have the same dtype. Little-endian machines only.
use std::{collections::BTreeMap, env, fs, io::Write, mem::size_of, path::Path, sync::Mutex};

struct Run { count: usize, step: usize, calls: BTreeMap<(String, usize), usize> }
static RUN: Mutex<Run> = Mutex::new(Run { count: 0, step: 0, calls: BTreeMap::new() });

/// Say which step of the loop the taps that follow belong to.
pub fn set_step(step: usize) { RUN.lock().unwrap().step = step }

/// The first tap writes the header; the program writes it again when it ended by itself.
pub fn header(complete: bool) {
    let Some(folder) = env::var_os("LYDITE_TRACE") else { return };
    let text = r#"{"format":"lydite-trace","version":1,"framework":"rust","complete":"#;
    put(Path::new(&folder), "trace.json", format!("{text}{complete}}}").as_bytes());
}
fn put(folder: &Path, name: &str, bytes: &[u8]) {
    let part = folder.join("part"); // a file is there whole or not at all
    fs::write(&part, bytes).and_then(|()| fs::rename(part, folder.join(name))).expect(name);
}

/// Record plain numbers, and return them dense, or the reference's. `dtype` is the format's: f32,
/// i64, bool …; bf16, f16 and f8 come as their bits. `strides` count elements; &[] means dense.
pub fn tap<T: Copy>(
    name: &str, dtype: &str, data: &[T], shape: &[usize], strides: &[usize],
) -> Vec<T> {
    let dense: Vec<usize> = (1..=shape.len()).map(|axis| shape[axis..].iter().product()).collect();
    let strides = if strides.is_empty() { &dense } else { strides };
    let along = |i: usize, axis: usize| i / dense[axis] % shape[axis] * strides[axis];
    let at = |i: usize| (0..shape.len()).map(|axis| along(i, axis)).sum::<usize>();
    let values: Vec<T> = (0..shape.iter().product()).map(|i| data[at(i)]).collect();
    let Some(folder) = env::var_os("LYDITE_TRACE") else { return values };
    let (folder, mut run) = (Path::new(&folder), RUN.lock().unwrap());
    if run.count == 0 { fs::create_dir(folder).expect("LYDITE_TRACE: a new folder"); header(false) }
    let (i, step) = (run.count, run.step);
    let call = *run.calls.entry((name.into(), step)).and_modify(|n| *n += 1).or_insert(0);
    let size = values.len() * size_of::<T>();
    let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size) };
    let about = format!(r#""dtype":"{}","shape":{shape:?}"#, dtype.to_uppercase());
    let head = format!(r#"{{"{i}":{{{about},"data_offsets":[0,{size}]}}}}"#);
    let head = format!("{head:<0$}", head.len().next_multiple_of(8)); // the data is then aligned
    let (shard, length) = (format!("t-{i:05}.safetensors"), (head.len() as u64).to_le_bytes());
    put(folder, &shard, &[&length, head.as_bytes(), bytes].concat()); // before its line
    let kind = if name.starts_with("selftest/") { "selftest" } else { "activation" };
    let place = format!(r#""i":{i},"name":"{name}","kind":"{kind}","step":{step},"call":{call}"#);
    let line = format!(r#"{{{place},{about},"shard":"{shard}","key":"{i}"}}"#) + "\n";
    let lines = fs::OpenOptions::new().create(true).append(true).open(folder.join("events.jsonl"));
    lines.and_then(|mut file| file.write_all(line.as_bytes())).expect(name);
    run.count += 1;
    reference(name, dtype, step, call, shape).unwrap_or(values)
}

fn reference<T: Copy>(
    name: &str, dtype: &str, step: usize, call: usize, shape: &[usize],
) -> Option<Vec<T>> {
    let (folder, at) = (env::var("LYDITE_INJECT").ok()?, env::var("LYDITE_INJECT_AT").ok()?);
    at.split(',').find(|p| *p == name || p.strip_suffix('*').is_some_and(|p| name.starts_with(p)))?;
    let lines = fs::read_to_string(Path::new(&folder).join("events.jsonl")).expect("LYDITE_INJECT");
    let is = |line: &str, key, default, value: &str| field(line, key).unwrap_or(default) == value;
    let here = |line: &&str| is(line, "name", "", name) && is(line, "step", "0", &step.to_string());
    let mut line = lines.lines().filter(here).filter(|l| is(l, "port", "out", "out")).nth(call)?;
    let (theirs, ours) = (field(line, "shape")?.replace(' ', ""), format!("{shape:?}"));
    assert_eq!(theirs, ours.replace(['[', ' ', ']'], ""), "{name}: the reference's shape, ours");
    if let Some(i) = field(line, "alias_of") { line = lines.lines().find(|l| is(l, "i", "", i))? }
    let file = fs::read(Path::new(&folder).join(field(line, "shard")?)).expect(name);
    let start = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let head = std::str::from_utf8(&file[8..start]).expect(name);
    let entry = head.split_once(&format!("\"{}\":", field(line, "key")?))?.1;
    assert!(is(entry, "dtype", "", &dtype.to_uppercase()), "{name}: the reference is not {dtype}");
    let offset: usize = field(entry, "data_offsets")?.split(',').next()?.trim().parse().ok()?;
    let bytes = file[start + offset..].chunks_exact(size_of::<T>()).take(shape.iter().product());
    Some(bytes.map(|value| unsafe { std::ptr::read_unaligned(value.as_ptr().cast()) }).collect())
}
fn field<'a>(json: &'a str, key: &str) -> Option<&'a str> {
    let rest = json.split_once(&format!("\"{key}\":"))?.1.trim_start();
    let end = rest.find(if rest.starts_with('[') { &[']'][..] } else { &[',', '}'] })?;
    Some(rest[..end].trim_matches(['"', '[', ' ']))
}
