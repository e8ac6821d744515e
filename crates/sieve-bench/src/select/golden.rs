//! The device's selections against lists of an independent computation (`tests/golden/selectors`), on the queries and
//! keys of trained models, which are bf16 and so the same operands.
use crate::device::{Device, download_mask};
use crate::emulator::tests::{AMPERE, emulated};
use safetensors::SafeTensors;
use sieve_kernels::DType;
use sieve_kernels::{KernelError, Qkv};
use sieve_select::{CallShape, Selector, Step};

static LISTS: &[u8] = include_bytes!("../../../../tests/golden/selectors/lists.safetensors");
static CAPTURED: &[u8] = include_bytes!("../../../../tests/golden/selectors/captured.safetensors");

/// Methods with stored lists; calls of each that a device takes, and calls that it leaves to the host. MOMO's are left
/// with `topk=exact`, with `score=normalised`, and where a chunk begins between two probes; PBS's with
/// `select=xattention`. BFLA's lists are of its rescue, which selects on the host.
const METHODS: &[(&str, Counts)] = &[
    ("momo", [6, 30]),
    ("xattention", [9, 0]),
    ("pbs", [9, 9]),
    ("vertical_slash", [9, 0]),
    ("flexprefill", [27, 0]),
    ("quest", [9, 0]),
];

/// How many stored calls a device takes, and how many it leaves to the host.
type Counts = [usize; 2];

/// What a comparison found.
#[derive(Default)]
struct Compared {
    calls: Counts,
    /// Counts that were run: those that are wanted, of those that the device takes.
    run: usize,
    /// Rows that differ.
    wrong: Vec<String>,
}

impl Compared {
    /// Notes a list that is not the stored one, up to the first difference and what follows.
    fn check(&mut self, place: &str, found: &[i32], stored: &[i32]) {
        let differs = found.iter().zip(stored).position(|(a, b)| a != b);
        if found != stored {
            let at = differs.unwrap_or(found.len().min(stored.len()));
            let part = |list: &[i32]| list[at..].iter().take(9).copied().collect::<Vec<i32>>();
            let (found, stored) = (part(found), part(stored));
            self.wrong
                .push(format!("{place}: from entry {at} on {found:?}, stored {stored:?}"));
        }
    }
}

/// Cells of 64 columns: narrower heads get zeros behind.
const NARROWEST: usize = 64;

fn ints(file: &SafeTensors<'_>, name: &str) -> Vec<i32> {
    let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    let words = tensor.data().as_chunks::<4>().0;
    words.iter().map(|b| i32::from_le_bytes(*b)).collect()
}

/// Heads of bf16, `[tokens, heads, width]`.
fn heads(file: &SafeTensors<'_>, name: &str) -> Tokens {
    let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    let halves = tensor.data().as_chunks::<2>().0;
    let values = halves.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32());
    Tokens {
        values: values.collect(),
        heads: tensor.shape()[1],
        width: tensor.shape()[2],
    }
}

struct Tokens {
    values: Vec<f32>,
    heads: usize,
    width: usize,
}

impl Tokens {
    /// Every `step`-th head.
    fn some(&self, step: usize) -> Self {
        let heads = self.values.chunks_exact(self.width).enumerate();
        let kept = heads.filter(|(at, _)| (at % self.heads).is_multiple_of(step));
        Self {
            values: kept.flat_map(|(_, head)| head).copied().collect(),
            heads: self.heads.div_ceil(step),
            width: self.width,
        }
    }

    /// One head of a token.
    fn of(&self, token: usize, head: usize) -> &[f32] {
        &self.values[(token * self.heads + head) * self.width..][..self.width]
    }

    /// The tokens before `end`, those before `first` as NaN, with zeros behind narrow heads.
    fn upload(&self, device: &dyn Device, first: usize, end: usize) -> sieve_kernels::CudaTensor {
        let width = self.width.max(NARROWEST);
        let mut values = Vec::new();
        for (at, head) in self.values.chunks_exact(self.width).enumerate() {
            if at / self.heads < end {
                let is_there = at / self.heads >= first;
                values.extend(head.iter().map(|&x| if is_there { x } else { f32::NAN }));
                values.resize(values.len() + width - self.width, 0.0);
            }
        }
        device.float(&values, &[1, end, self.heads, width], DType::BF16)
    }
}

/// Compares every stored call of a method that the device takes and that `wanted` names.
fn compare(device: &dyn Device, method: &str, wanted: impl Fn(&str, &str) -> bool) -> Result<Compared, KernelError> {
    let [lists, captured] = [LISTS, CAPTURED].map(|file| SafeTensors::deserialize(file).expect("a stored file"));
    let mut done = Compared::default();
    for name in lists.names() {
        let parts: Vec<&str> = name.split('/').collect();
        let [inputs, place, text, "ptr"] = parts[..] else {
            continue;
        };
        let is_asked = inputs.starts_with("trained") && text.split(':').next() == Some(method);
        if !is_asked {
            continue;
        }
        // The first query head of each KV head of another.
        let (of, step) = match inputs {
            "trained.2.2" => ("trained.4.2", 2),
            inputs => (inputs, 1),
        };
        let q = heads(&captured, &format!("{of}/q")).some(step);
        let k = heads(&captured, &format!("{of}/k"));
        let number = |text: &str| text.parse::<usize>().expect("a number");
        let token = place.strip_prefix("token-").map(number);
        let (context, end) = match (token, place.split_once('-')) {
            (Some(token), _) => (token, token + 1),
            (None, Some((context, end))) => (number(context), number(end)),
            (None, None) => panic!("{place}"),
        };
        let shape = CallShape::new([end - context, end], [q.heads, k.heads], q.width);
        let mut selector = Selector::parse(text).expect("the file's selectors are valid");
        selector.common.min_prefill_tokens = 0;
        // Its own width gives the scale; cells are of the wider heads.
        let wide = CallShape {
            head_dim: q.width.max(NARROWEST),
            ..shape
        };
        let (chosen, is_step) = match token {
            None => (selector.block_selection(wide, 0, 0), false),
            Some(_) => match selector.step(wide, 0, 0) {
                Some(Step::Blocks(selection, _)) => (Some(*selection), true),
                _ => (None, true),
            },
        };
        done.calls[usize::from(chosen.is_none())] += 1;
        let Some(mut selection) = chosen.filter(|_| wanted(inputs, place)) else {
            continue;
        };
        done.run += 1;
        selection.scores.softmax_scale = shape.softmax_scale();
        let (q_on, k_on) = (q.upload(device, context, end), k.upload(device, 0, end));
        let qkv = Qkv::separate(&q_on, &k_on, &k_on);
        let bounds = selector.page().map(|page| {
            let room = [k.heads, end.div_ceil(page), 2, wide.head_dim];
            k_on.zeros_contiguous(&room, DType::F32)
        });
        let made = qkv.select_blocks(&selection, bounds.as_ref())?;
        let found = download_mask(device, made)?;
        let rows = found.tiles.num_query_tiles();
        let case = name.trim_end_matches("/ptr");
        let ints = |array: &str| ints(&lists, &format!("{case}/{array}"));
        let (ptr, idx) = (ints("ptr"), ints("idx"));
        for row in 0..ptr.len() - 1 {
            let expected = &idx[ptr[row] as usize..ptr[row + 1] as usize];
            let tiles = found.row(row / rows, row % rows);
            // A token's list names keys.
            let keys_of = |&j: &i32| found.tiles.keys(j as usize).map(|key| key as i32);
            let keys: Vec<i32> = match is_step {
                true => tiles.iter().flat_map(keys_of).collect(),
                false => tiles.to_vec(),
            };
            done.check(&format!("{case}: row {row}"), &keys, expected);
            let columns = found.columns(row / rows, row % rows);
            if method == "vertical_slash" {
                let (ptr, idx) = (ints("col_ptr"), ints("col_idx"));
                let expected = &idx[ptr[row] as usize..ptr[row + 1] as usize];
                done.check(&format!("{case}: columns of row {row}"), columns, expected);
            }
        }
        if method == "pbs" {
            let stored = ints("order");
            let heads = found.key_order().chunks_exact(end);
            for (kv_head, (found, stored)) in heads.zip(stored.chunks_exact(end)).enumerate() {
                let place = format!("{case}: keys of KV head {kv_head}");
                let stored = with_ties(found, stored, || attention_of_keys(&q, &k, kv_head, end));
                done.check(&place, found, &stored);
            }
        }
    }
    Ok(done)
}

/// Two keys whose scores differ by no more than this share may stand in either order: f32 sums of some hundred terms.
const TIED: f64 = 2e-6;

/// A stored order with tied keys as they were found.
fn with_ties(found: &[i32], stored: &[i32], scores: impl Fn() -> Vec<f64>) -> Vec<i32> {
    let sorted = |order: &[i32]| {
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        sorted
    };
    if found == stored || sorted(found) != sorted(stored) {
        return stored.to_vec();
    }
    let scores = scores();
    let tied = |(&a, &b): (&i32, &i32)| {
        let [of_a, of_b] = [a, b].map(|key| scores[key as usize]);
        if (of_a - of_b).abs() <= TIED * of_b { a } else { b }
    };
    found.iter().zip(stored).map(tied).collect()
}

/// What PBS orders keys by: the attention that they get from the last block of rows, in f64.
fn attention_of_keys(q: &Tokens, k: &Tokens, kv_head: usize, end: usize) -> Vec<f64> {
    const LAST_ROWS: usize = 32;
    let mut sums = vec![0.0; end];
    let group = q.heads / k.heads;
    for head in kv_head * group..(kv_head + 1) * group {
        for row in end - LAST_ROWS..end {
            let logit = |key: usize| {
                let pairs = q.of(row, head).iter().zip(k.of(key, kv_head));
                let product: f64 = pairs.map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
                product / (q.width as f64).sqrt()
            };
            let logits: Vec<f64> = (0..=row).map(logit).collect();
            let most = logits.iter().copied().fold(f64::MIN, f64::max);
            let weights = logits.iter().map(|x| (x - most).exp());
            let all: f64 = weights.clone().sum();
            sums.iter_mut()
                .zip(weights)
                .for_each(|(sum, weight)| *sum += weight / all);
        }
    }
    sums
}

#[test]
fn the_emulated_selections_are_the_stored_ones() {
    emulated("stored selections", AMPERE, 1, |emulator, report| {
        for &(method, calls) in METHODS {
            // Whole prompts of one model, and tokens: all of them would take some ten minutes.
            let wanted = |inputs: &str, place: &str| {
                inputs == "trained.2.2" && (place.starts_with("0-") || place.starts_with("token"))
            };
            let done = compare(emulator, method, wanted)?;
            assert!(done.wrong.is_empty(), "{:#?}", done.wrong);
            assert_eq!((done.calls, done.run > 0), (calls, true), "{method}");
            report.add(method, "emulator", "stored", Ok(0.0));
        }
        Ok(())
    });
}

#[test]
#[ignore = "needs a GPU"]
fn the_selections_of_a_gpu_are_the_stored_ones() {
    let device = crate::device::Gpu::new(0, sieve_kernels::KernelPolicy::default());
    let mut wrong = Vec::new();
    for &(method, calls) in METHODS {
        let done = compare(&device, method, |_, _| true).expect("kernels run");
        assert_eq!((done.calls, done.run), (calls, calls[0]), "{method}");
        wrong.extend(done.wrong);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
