//! Selections on the device against sieve-select's on the CPU, from the same bf16 operands.
use crate::device::Device;
use crate::error::Result;
use crate::extent::Extent;
use crate::report::{Report, is_device_limit};
use burn::tensor::DType;
use sieve_core::BlockSelection;
use sieve_kernels::{
    AttentionShape, KernelError, KernelFamily, KeySource, Qkv, attention_family, select_blocks,
};
use sieve_select::{Call, CallShape, Selector, SparseMask};
use sieve_testing::Random;

/// Selectors whose steps a device takes; `TAU` stands for a share of mass.
const SELECTORS: &[&str] = &[
    "meanpool:block=32,tau=TAU",
    "meanpool:block=16,top_k=3,gqa=union",
    "block_sparse:block=32,topk=2",
    "bfla:block=64,group=16,tile=16,local_tokens=16,keep_mass=TAU",
    "bfla:block=32,group=32,tile=32,local_tokens=0,keep_mass=TAU,gqa=per_query,sink_tiles=2",
    "bfla:block=64,pooling=mean,tile=32,keep_mass=TAU",
    "xattention:block=32,stride=8,tau=TAU",
    "xattention:block=64,stride=16,tau=TAU,mode=slash,norm=0.5,gqa=union",
];

/// The share of mass, and how far sums in another order may move it.
const TAU: f64 = 0.6;
const MARGIN: f64 = 1e-5;

/// The share of rows that may lie within the margin.
const MOST_ROWS_AT_THE_MARGIN: f64 = 0.02;

/// Queries and keys: whole prompts, a chunk that begins inside a cell, one query.
const SIZES: &[[usize; 2]] = &[[300, 300], [150, 391], [1, 70]];

/// The wrapper with each selector, at several sizes; and once with a number that is none.
pub(crate) fn check_wrappers(
    report: &mut Report,
    device: &dyn Device,
    extent: &Extent,
) -> Result<()> {
    let mut random = Random(extent.seed);
    for &name in SELECTORS {
        for (at, &[num_queries, num_keys]) in SIZES.iter().enumerate() {
            let num_kv_heads = random.between(1, 3);
            let shape = CallShape {
                num_queries,
                num_keys,
                num_heads: num_kv_heads * random.one_of(&[1, 2, 3]),
                num_kv_heads,
                head_dim: [64, 128][at % 2],
            };
            for has_nan in [false, true] {
                if has_nan && at != 0 {
                    continue;
                }
                let case = Case::draw(shape, name, has_nan, &mut random);
                let row = format!("select_blocks, {}", name.split(':').next().unwrap_or(name));
                let label = format!("{name} {shape:?} NaN: {has_nan}");
                match case.run(device) {
                    Ok(outcome) => report.add(&row, case.path(device), &label, outcome),
                    Err(error) if is_device_limit(&error.to_string()) => {
                        report.add_missing(&row, &error.to_string());
                    }
                    Err(error) => report.add(&row, "refused", &label, Err(error.to_string())),
                }
            }
        }
    }
    Ok(())
}

struct Case {
    shape: CallShape,
    name: &'static str,
    q: Vec<f32>,
    k: Vec<f32>,
}

impl Case {
    fn draw(shape: CallShape, name: &'static str, has_nan: bool, random: &mut Random) -> Self {
        let mut q = random.bf16_normals(shape.num_queries * shape.num_heads * shape.head_dim);
        let k = random.bf16_normals(shape.num_keys * shape.num_kv_heads * shape.head_dim);
        if has_nan {
            // Of the first head's last query.
            let at = (shape.num_queries - 1) * shape.num_heads * shape.head_dim;
            q[at + 3] = f32::NAN;
        }
        Self { shape, name, q, k }
    }

    fn selector(&self, tau: f64) -> Selector {
        let name = self.name.replace("TAU", &tau.to_string());
        let selector = Selector::parse(&format!("{name},min_prefill_tokens=0"));
        selector.expect("the names above are right")
    }

    fn path(&self, device: &dyn Device) -> &'static str {
        let CallShape {
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = self.shape;
        let shape = AttentionShape {
            batch: 1,
            seq_len: 1,
            num_heads,
            num_kv_heads,
            head_dim,
            head_dim_v: head_dim,
        };
        let like = device.float(&[0.0], &[1], DType::F32);
        match attention_family(&shape, KeySource::Dense, &like) {
            KernelFamily::Portable => "portable kernels",
            KernelFamily::Hopper => "Hopper kernels",
        }
    }

    fn on_host(&self, tau: f64) -> SparseMask {
        let call = Call::without_values(self.shape, &self.q, &self.k).expect("sizes fit");
        let mask = self.selector(tau).select(&call);
        mask.expect("a prefill method")
    }

    fn run(&self, device: &dyn Device) -> Result<Result<f32, String>, KernelError> {
        let CallShape {
            num_keys,
            num_heads,
            num_kv_heads,
            head_dim,
            ..
        } = self.shape;
        // Earlier tokens have no query.
        let mut q = vec![f32::NAN; self.shape.context() * num_heads * head_dim];
        q.extend(&self.q);
        let put = |values: &[f32], heads| {
            device.float(values, &[1, num_keys, heads, head_dim], DType::BF16)
        };
        let k = put(&self.k, num_kv_heads);
        let qkv = Qkv::separate(&put(&q, num_heads), &k, &k);
        let selection = self.selector(TAU).block_selection(self.shape, 0);
        let selection = selection.expect("a device takes these");
        let made = select_blocks(&qkv, &selection)?;
        let found = Found {
            data: device.ints(&made.data)?,
            counts: device.ints(&made.counts)?,
            pairs: device.ints(&made.pairs)?,
            nan_rows: device.ints(&made.nan_rows)?,
            selection,
        };
        Ok(self.judge(&found))
    }

    /// The share of rows whose lists differ, of what is allowed. Every difference must lie at the margin.
    fn judge(&self, found: &Found) -> Result<f32, String> {
        let [low, exact, high] = [TAU - MARGIN, TAU, TAU + MARGIN].map(|tau| self.on_host(tau));
        let nan_heads = found.nan_rows.iter().filter(|&&rows| rows > 0).count();
        if nan_heads != exact.stats.nan_lists {
            return Err(format!(
                "{nan_heads} heads with NaN, the CPU has {}",
                exact.stats.nan_lists
            ));
        }
        let (rows, mut differing) = (exact.tiles.num_query_tiles(), 0);
        for list in 0..exact.num_lists() {
            for i in 0..rows {
                let (place, tiles) = (format!("list {list}, row {i}"), found.row(list * rows + i));
                let expected = exact.row(list, i);
                let inside = low.row(list, i).iter().all(|j| tiles.contains(j))
                    && tiles.iter().all(|j| high.row(list, i).contains(j));
                if !inside || !tiles.is_sorted() {
                    return Err(format!("{place}: {tiles:?}, the CPU keeps {expected:?}"));
                }
                differing += usize::from(tiles != expected);
                let at = list * rows + i;
                let pairs = self.pairs(&exact, i, tiles);
                if found.counts[at] as usize != tiles.len() || found.pairs[at] as usize != pairs {
                    return Err(format!(
                        "{place}: {} tiles, {} pairs; {} and {pairs} are kept",
                        found.counts[at],
                        found.pairs[at],
                        tiles.len()
                    ));
                }
            }
        }
        let share = differing as f64 / (exact.num_lists() * rows) as f64;
        // Of few rows one may lie there.
        let allowed = MOST_ROWS_AT_THE_MARGIN.max(1.0 / (exact.num_lists() * rows) as f64);
        Ok((share / allowed) as f32)
    }

    fn pairs(&self, mask: &SparseMask, row: usize, tiles: &[i32]) -> usize {
        let positions = mask.tiles.first(row)..=mask.tiles.last(row);
        let keys = |tile: &i32| mask.tiles.keys(*tile as usize);
        let seen = |position: usize| {
            tiles
                .iter()
                .flat_map(keys)
                .filter(|&key| key <= position)
                .count()
        };
        positions.map(seen).sum()
    }
}

/// What the device chose.
struct Found {
    selection: BlockSelection,
    data: Vec<i32>,
    counts: Vec<i32>,
    pairs: Vec<i32>,
    nan_rows: Vec<i32>,
}

impl Found {
    fn row(&self, at: usize) -> &[i32] {
        let [_, row_ptr, tile_idx, ..] = self.selection.layout().places;
        let bound = |at: usize| tile_idx + self.data[row_ptr + at] as usize;
        &self.data[bound(at)..bound(at + 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::emulator::tests::emulated;

    #[test]
    fn the_emulated_selection_is_the_cpus() {
        let checked = emulated("sieve-select", |emulator, report| {
            check_wrappers(report, emulator, &Extent::emulated(4, 130, 3))
        });
        let Some(report) = checked else {
            return;
        };
        assert_eq!(report.failed(), 0, "{report}");
        assert!(report.rows().len() >= 4, "{report}");
    }
}
