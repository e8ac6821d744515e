//! Compares the device's selections with the lists of an independent implementation (`tests/golden/selectors`). Both
//! read queries and keys of trained models; the stored ones are bf16, so the device reads the same numbers.
use super::tokens::Text;
use crate::device::{Device, download_mask};
use crate::emulator::tests::{AMPERE, emulated};
use rayon::prelude::*;
use safetensors::SafeTensors;
use sieve_core::BlockSelection;
use sieve_kernels::{AttentionShape, DType, KernelError, Qkv};
use sieve_select::{CallShape, Selector, TokenKeys};
use std::ops::Range;

static LISTS: &[u8] = include_bytes!("../../../../../tests/golden/selectors/lists.safetensors");
static CAPTURED: &[u8] = include_bytes!("../../../../../tests/golden/selectors/captured.safetensors");

/// Methods with stored lists, each with the number of stored calls that select on the device and on the host. MOMO
/// selects on the host with `score=normalised`, and where a chunk begins between two of its probe rows.
const METHODS: &[(&str, Counts)] = &[
    ("bfla", [9, 0]),
    ("momo", [9, 27]),
    ("xattention", [9, 0]),
    ("pbs", [18, 0]),
    ("vertical_slash", [9, 0]),
    ("flexprefill", [27, 0]),
    ("quest", [9, 0]),
];

/// How many stored calls select on the device, and how many on the host.
type Counts = [usize; 2];

/// What [`compare`] found.
#[derive(Default)]
struct Compared {
    calls: Counts,
    /// How many calls were run: `wanted` calls that select on the device.
    run: usize,
    /// A message for each list that differs from the stored one.
    wrong: Vec<String>,
}

impl Compared {
    /// Where the lists differ, adds a message with up to nine entries of each from the first difference on.
    fn check(&mut self, place: &str, found: &[i32], stored: &[i32]) {
        if found == stored {
            return;
        }
        let pairs = found.iter().zip(stored);
        let at = pairs.take_while(|(a, b)| a == b).count();
        let [found, stored] = [found, stored].map(|list| &list[at..list.len().min(at + 9)]);
        let message = format!("{place}: from entry {at} on {found:?}, stored {stored:?}");
        self.wrong.push(message);
    }
}

/// Narrowest heads of the selection kernels; narrower heads are padded with zeros.
const NARROWEST: usize = 64;

fn ints(file: &SafeTensors<'_>, name: &str) -> Vec<i32> {
    let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    let words = tensor.data().as_chunks::<4>().0;
    words.iter().map(|b| i32::from_le_bytes(*b)).collect()
}

/// Reads a bf16 tensor `[tokens, heads, width]`.
fn heads(file: &SafeTensors<'_>, name: &str) -> Tokens {
    let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
    let halves = tensor.data().as_chunks::<2>().0;
    let values = halves.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32());
    Tokens { values: values.collect(), heads: tensor.shape()[1], width: tensor.shape()[2] }
}

struct Tokens {
    values: Vec<f32>,
    heads: usize,
    width: usize,
}

impl Tokens {
    /// A copy with every `step`-th head.
    fn every_nth_head(&self, step: usize) -> Self {
        let heads = self.values.chunks_exact(self.width).enumerate();
        let kept = heads.filter(|(at, _)| (at % self.heads).is_multiple_of(step));
        Self {
            values: kept.flat_map(|(_, head)| head).copied().collect(),
            heads: self.heads.div_ceil(step),
            width: self.width,
        }
    }

    /// The vector of one token and head.
    fn of(&self, token: usize, head: usize) -> &[f32] {
        &self.values[(token * self.heads + head) * self.width..][..self.width]
    }

    /// The heads of some tokens, padded with zeros to [`NARROWEST`].
    fn padded(&self, tokens: Range<usize>) -> Vec<f32> {
        let width = self.width.max(NARROWEST);
        let mut values = Vec::new();
        for head in self.values[tokens.start * self.heads * self.width..tokens.end * self.heads * self.width]
            .chunks_exact(self.width)
        {
            values.extend(head);
            values.resize(values.len() + width - self.width, 0.0);
        }
        values
    }

    /// Uploads the tokens before `end`. Tokens before `first` are NaN; heads are padded as in [`padded`](Self::padded).
    fn upload(&self, device: &dyn Device, first: usize, end: usize) -> sieve_kernels::CudaTensor {
        let width = self.width.max(NARROWEST);
        let mut values = vec![f32::NAN; first * self.heads * width];
        values.extend(self.padded(first..end));
        device.float(&values, &[1, end, self.heads, width], DType::BF16)
    }
}

/// A stored call of a selector. Its arrays are named `INPUTS/PLACE/SELECTOR/ARRAY` in the file of lists; each call has
/// an array `ptr`.
struct StoredCall<'a> {
    lists: &'a SafeTensors<'a>,
    /// The name without the array's.
    name: &'a str,
    /// Whose queries and keys the call reads.
    inputs: &'a str,
    /// A chunk of a prompt, `CONTEXT-END`, or a decoded token, `token-N`.
    place: &'a str,
    /// The selector with its settings, as the program takes it.
    selector: &'a str,
}

impl<'a> StoredCall<'a> {
    /// The call that has this array as `ptr`; `None` for the other arrays of a call.
    fn of_array(lists: &'a SafeTensors<'a>, array: &'a str) -> Option<Self> {
        let name = array.strip_suffix("/ptr")?;
        let [inputs, place, selector] = name.split('/').collect::<Vec<_>>()[..] else {
            return None;
        };
        Some(Self { lists, name, inputs, place, selector })
    }

    /// Whether a method selects here for queries and keys of a trained model.
    fn is_of_trained(&self, method: &str) -> bool {
        self.inputs.starts_with("trained") && self.selector.split(':').next() == Some(method)
    }

    fn is_decoded(&self) -> bool {
        self.place.starts_with("token-")
    }

    /// The query tokens for which keys are selected: the tokens of a chunk, or one decoded token.
    fn tokens(&self) -> Range<usize> {
        let number = |text: &str| text.parse::<usize>().expect("a number");
        match (self.place.strip_prefix("token-").map(number), self.place.split_once('-')) {
            (Some(token), _) => token..token + 1,
            (None, Some((context, end))) => number(context)..number(end),
            (None, None) => panic!("{}", self.place),
        }
    }

    /// Queries and keys.
    fn heads(&self, captured: &SafeTensors<'_>) -> [Tokens; 2] {
        // The inputs `trained.2.2` are the first query head of each KV head of `trained.4.2`.
        let (stored, step) = match self.inputs {
            "trained.2.2" => ("trained.4.2", 2),
            inputs => (inputs, 1),
        };
        let q = heads(captured, &format!("{stored}/q")).every_nth_head(step);
        [q, heads(captured, &format!("{stored}/k"))]
    }

    fn selector(&self) -> Selector {
        let mut selector = Selector::parse(self.selector).expect("the file's selectors are valid");
        selector.common.min_prefill_tokens = 0;
        selector
    }

    /// How the device selects in a chunk; `None` where only the host does.
    fn selection(&self, [q, k]: &[Tokens; 2]) -> Option<BlockSelection> {
        let tokens = self.tokens();
        let shape = CallShape::new([tokens.len(), tokens.end], [q.heads, k.heads], q.width);
        let padded = CallShape { head_dim: q.width.max(NARROWEST), ..shape };
        let mut selection = self.selector().block_selection(padded, 0, 0)?;
        // The columns of padding are zeros, so the softmax scale is that of the width without padding.
        selection.scores.softmax_scale = shape.softmax_scale();
        Some(selection)
    }

    fn ints(&self, array: &str) -> Vec<i32> {
        ints(self.lists, &format!("{}/{array}", self.name))
    }

    /// The lists of the array `idx`, which begin where `ptr` says.
    fn stored_lists(&self, ptr: &str, idx: &str) -> Vec<Vec<i32>> {
        let (ptr, idx) = (self.ints(ptr), self.ints(idx));
        ptr.windows(2).map(|list| idx[list[0] as usize..list[1] as usize].to_vec()).collect()
    }
}

/// Compares the stored calls of a method that select on the device. `wanted(inputs, place)` says which of them to run;
/// a place is a chunk of a prompt, `CONTEXT-END`, or a decoded token, `token-N`.
fn compare(device: &dyn Device, method: &str, wanted: impl Fn(&str, &str) -> bool) -> Result<Compared, KernelError> {
    let [lists, captured] = [LISTS, CAPTURED].map(|file| SafeTensors::deserialize(file).expect("a stored file"));
    let mut done = Compared::default();
    for array in lists.names() {
        let Some(call) = StoredCall::of_array(&lists, array).filter(|call| call.is_of_trained(method)) else {
            continue;
        };
        let (inputs, is_wanted) = (call.heads(&captured), wanted(call.inputs, call.place));
        if call.is_decoded() {
            let keys = call.selector().token_keys(call.tokens().end, 0).expect("a device takes stored tokens");
            done.calls[0] += 1;
            if is_wanted {
                done.run += 1;
                compare_token(device, &call, &inputs, keys, &mut done)?;
            }
            continue;
        }
        let selection = call.selection(&inputs);
        done.calls[usize::from(selection.is_none())] += 1;
        if let Some(selection) = selection.filter(|_| is_wanted) {
            done.run += 1;
            compare_chunk(device, &call, &inputs, &selection, &mut done)?;
        }
    }
    Ok(done)
}

/// Compares the keys that the device chooses for a decoded token.
fn compare_token(
    device: &dyn Device,
    call: &StoredCall<'_>,
    [q, k]: &[Tokens; 2],
    keys: TokenKeys,
    done: &mut Compared,
) -> Result<(), KernelError> {
    let (tokens, width) = (call.tokens(), q.width.max(NARROWEST));
    let shape = AttentionShape::new(1, 1, [q.heads, k.heads], [width; 2]);
    let before = k.padded(0..tokens.start);
    // A choice does not read values: keys fill their place.
    let text = Text::new(device, [&before, &before], shape, [tokens.start, tokens.end], keys);
    let [q, k] = [q, k].map(|x| device.float(&x.padded(tokens.clone()), &[1, 1, x.heads, width], DType::BF16));
    let found = text.choose(&Qkv::separate(&q, &k, &k), tokens.start, keys)?.expect("it chooses");
    let stored = call.stored_lists("ptr", "idx");
    for (row, found) in found.iter().enumerate() {
        let found: Vec<i32> = found.iter().map(|&key| key as i32).collect();
        done.check(&format!("{}: row {row}", call.name), &found, &stored[row]);
    }
    Ok(())
}

/// Compares the mask that the device makes for a chunk: its tiles, and the single columns and the order of keys where
/// the method stored them.
fn compare_chunk(
    device: &dyn Device,
    call: &StoredCall<'_>,
    inputs: &[Tokens; 2],
    selection: &BlockSelection,
    done: &mut Compared,
) -> Result<(), KernelError> {
    let ([q, k], Range { start, end }, case) = (inputs, call.tokens(), call.name);
    // A selection does not read values: keys fill their place.
    let (q_on, k_on) = (q.upload(device, start, end), k.upload(device, 0, end));
    let made = Qkv::separate(&q_on, &k_on, &k_on).select_blocks(selection)?.mask;
    let found = download_mask(device, made)?;
    let rows = found.tiles.num_query_tiles();
    for (row, expected) in call.stored_lists("ptr", "idx").iter().enumerate() {
        done.check(&format!("{case}: row {row}"), found.row(row / rows, row % rows), expected);
    }
    let method = call.selector.split(':').next();
    if method == Some("vertical_slash") {
        for (row, expected) in call.stored_lists("col_ptr", "col_idx").iter().enumerate() {
            let columns = found.columns(row / rows, row % rows);
            done.check(&format!("{case}: columns of row {row}"), columns, expected);
        }
    }
    if method == Some("pbs") {
        let stored = call.ints("order");
        let heads = found.key_order().chunks_exact(end);
        for (kv_head, (found, stored)) in heads.zip(stored.chunks_exact(end)).enumerate() {
            let place = format!("{case}: keys of KV head {kv_head}");
            let stored = with_ties(found, stored, || attention_by_key(q, k, kv_head, end));
            done.check(&place, found, &stored);
        }
    }
    Ok(())
}

/// Two keys whose scores differ by no more than this share may be in either order: the error of f32 sums of some
/// hundred terms.
const TIED: f64 = 2e-6;

/// The stored order, with tied keys put in the order of `found`.
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

/// The score by which PBS orders keys: the sum of attention probabilities that the last 32 rows give a key, in f64.
fn attention_by_key(q: &Tokens, k: &Tokens, kv_head: usize, end: usize) -> Vec<f64> {
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
            sums.iter_mut().zip(weights).for_each(|(sum, weight)| *sum += weight / all);
        }
    }
    sums
}

#[test]
fn the_emulated_selections_are_the_stored_ones() {
    // Methods run side by side, because a launch of the emulator takes one processor.
    METHODS.par_iter().for_each(|&(method, calls)| {
        emulated(method, AMPERE, 1, |emulator, report| {
            // Only whole prompts of one model, and decoded tokens: all stored calls would take some ten minutes.
            let wanted = |inputs: &str, place: &str| {
                inputs == "trained.2.2" && (place.starts_with("0-") || place.starts_with("token"))
            };
            let done = compare(emulator, method, wanted)?;
            assert!(done.wrong.is_empty(), "{:#?}", done.wrong);
            assert_eq!((done.calls, done.run > 0), (calls, true), "{method}");
            report.add(method, "emulator", "stored", Ok(0.0));
            Ok(())
        });
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
