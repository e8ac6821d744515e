//! The device's selections against lists of an independent computation (`tests/golden/selectors`), on the queries and
//! keys of trained models, which are bf16 and so the same operands.
use super::Found;
use crate::device::Device;
use burn::tensor::DType;
use serde_json::Value;
use sieve_kernels::{KernelError, Qkv};
use sieve_select::{CallShape, Selector, Step};

static LISTS: &[u8] = include_bytes!("../../../../tests/golden/selectors/lists.safetensors");
static CAPTURED: &[u8] = include_bytes!("../../../../tests/golden/selectors/captured.safetensors");

/// Methods with stored lists, and calls of each that a device takes. BFLA's lists are of its rescue, which selects on
/// the host.
const METHODS: &[(&str, usize)] = &[
    ("momo", 8),
    ("xattention", 9),
    ("pbs", 9),
    ("vertical_slash", 9),
    ("flexprefill", 27),
    ("quest", 9),
];

/// Cells of 64 columns: narrower heads get zeros behind.
const NARROWEST: usize = 64;

/// Tensors of a file of safetensors.
struct Stored {
    header: Value,
    body: &'static [u8],
}

impl Stored {
    fn of(file: &'static [u8]) -> Self {
        let length = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
        let header = serde_json::from_slice(&file[8..8 + length]).expect("a JSON header");
        let body = &file[8 + length..];
        Self { header, body }
    }

    fn bytes(&self, name: &str) -> (Vec<usize>, &'static [u8]) {
        let numbers = |key: &str| -> Vec<usize> {
            let list = self.header[name][key].as_array();
            let list = list.unwrap_or_else(|| panic!("{name} is not there"));
            list.iter().filter_map(|x| Some(x.as_u64()? as usize)).collect()
        };
        let at = numbers("data_offsets");
        (numbers("shape"), &self.body[at[0]..at[1]])
    }

    fn ints(&self, name: &str) -> Vec<i32> {
        let words = self.bytes(name).1.as_chunks::<4>().0;
        words.iter().map(|b| i32::from_le_bytes(*b)).collect()
    }

    /// Heads of bf16, `[tokens, heads, width]`.
    fn heads(&self, name: &str) -> Tokens {
        let (shape, bytes) = self.bytes(name);
        let halves = bytes.as_chunks::<2>().0;
        let values = halves.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32());
        Tokens {
            values: values.collect(),
            heads: shape[1],
            width: shape[2],
        }
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

/// Compares every stored call of a method that the device takes and that `wanted` names; returns how many there were.
fn compare(device: &dyn Device, method: &str, wanted: impl Fn(&str, &str) -> bool) -> Result<usize, KernelError> {
    let (lists, captured) = (Stored::of(LISTS), Stored::of(CAPTURED));
    let names: Vec<String> = lists.header.as_object().expect("a header").keys().cloned().collect();
    let mut compared = 0;
    for name in names {
        let parts: Vec<&str> = name.split('/').collect();
        let [inputs, place, text, "ptr"] = parts[..] else {
            continue;
        };
        let is_asked = inputs.starts_with("trained") && text.split(':').next() == Some(method);
        if !is_asked || !wanted(inputs, place) {
            continue;
        }
        // The first query head of each KV head of another.
        let (of, step) = match inputs {
            "trained.2.2" => ("trained.4.2", 2),
            inputs => (inputs, 1),
        };
        let q = captured.heads(&format!("{of}/q")).some(step);
        let k = captured.heads(&format!("{of}/k"));
        let number = |text: &str| text.parse::<usize>().expect("a number");
        let token = place.strip_prefix("token-").map(number);
        let (context, end) = match (token, place.split_once('-')) {
            (Some(token), _) => (token, token + 1),
            (None, Some((context, end))) => (number(context), number(end)),
            (None, None) => panic!("{place}"),
        };
        let shape = CallShape {
            num_queries: end - context,
            num_keys: end,
            num_heads: q.heads,
            num_kv_heads: k.heads,
            head_dim: q.width,
        };
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
        let Some(mut selection) = chosen else {
            continue;
        };
        selection.softmax_scale = shape.softmax_scale();
        let (q, k) = (q.upload(device, context, end), k.upload(device, 0, end));
        let qkv = Qkv::separate(&q, &k, &k);
        let bounds = selector.page().map(|page| {
            let room = [k.shape()[2], end.div_ceil(page), 2, wide.head_dim];
            k.zeros_contiguous(&room, DType::F32)
        });
        let made = qkv.select_blocks(&selection, bounds.as_ref())?;
        let found = Found {
            data: device.ints(&made.data)?,
            counts: Vec::new(),
            pairs: Vec::new(),
            nan_rows: Vec::new(),
            selection,
        };
        let case = name.trim_end_matches("/ptr");
        let ints = |array: &str| lists.ints(&format!("{case}/{array}"));
        let (ptr, idx) = (ints("ptr"), ints("idx"));
        for row in 0..ptr.len() - 1 {
            let expected = &idx[ptr[row] as usize..ptr[row + 1] as usize];
            let tiles = found.row(row);
            // A token's list names keys.
            let tile = found.selection.tile as i32;
            let keys: Vec<i32> = match is_step {
                true => tiles
                    .iter()
                    .flat_map(|&j| j * tile..((j + 1) * tile).min(end as i32))
                    .collect(),
                false => tiles.to_vec(),
            };
            assert_eq!(keys, expected, "{case}: row {row}");
            let columns = found.columns(row);
            if method == "vertical_slash" && !columns.is_empty() {
                let (ptr, idx) = (ints("col_ptr"), ints("col_idx"));
                let expected = &idx[ptr[row] as usize..ptr[row + 1] as usize];
                assert_eq!(columns, expected, "{case}: columns of row {row}");
            }
        }
        if method == "pbs" {
            let order = ints("order");
            assert_eq!(found.order(5, order.len()), order, "{case}");
        }
        compared += 1;
    }
    Ok(compared)
}

#[test]
fn the_emulated_selections_are_the_stored_ones() {
    crate::emulator::tests::emulated(1, |emulator, report| {
        for (method, _) in METHODS {
            // Whole prompts of one model, and tokens.
            let wanted = |inputs: &str, place: &str| {
                inputs == "trained.2.2" && (place.starts_with("0-") || place.starts_with("token"))
            };
            let compared = compare(emulator, method, wanted)?;
            assert!(compared > 0, "{method}");
            report.add(method, "emulator", "stored", Ok(0.0));
        }
        Ok(())
    });
}

#[test]
#[ignore = "needs a GPU"]
fn the_selections_of_a_gpu_are_the_stored_ones() {
    let device = burn_cuda::CudaDevice::new(0);
    for &(method, least) in METHODS {
        let compared = compare(&device, method, |_, _| true).expect("kernels run");
        assert!(compared >= least, "{method}: {compared} calls");
    }
}
