//! Attention over a window, a document's first keys and a band for each KV head, and its gradients, through the launch
//! wrappers.
use crate::attention::{Prepared, check_wrapper, orders_agree, repeat};
use crate::case::{Case, Cuts, Keys};
use crate::device::Device;
use crate::error::Result;
use crate::extent::{Extent, add_attention};
use crate::on_device::{self, OnDevice};
use crate::report::{Outcome, Report};
use crate::scores::Scores;
use crate::strided::Layout;
use sieve_core::FarKeys;
use sieve_kernels::{AttentionNeeds, AttentionShape, DeviceReport, NeededKernels, NeededKeys, SumOrder};
use sieve_testing::Random;

/// Widths of heads: those of Hopper's kernels, and one that no tile divides.
const WIDTHS: [usize; 3] = [64, 128, 96];
/// The width for the emulator.
const EMULATED: [usize; 1] = [32];
/// Widths of heads of tokens: those, and one for which warps of a token are few.
pub(crate) const TOKEN_WIDTHS: [usize; 4] = [64, 128, 96, 256];

/// Sizes and keys of a call.
pub(crate) struct Draw {
    seq_len: usize,
    heads: [usize; 2],
    window: usize,
    far: FarKeys,
    cuts: Cuts,
}

/// The keys beyond a window, whose first band is that of the first KV head.
const fn far(sink_tokens: usize, distances: [usize; 2], num_bands: usize) -> FarKeys {
    FarKeys { sink_tokens, distances, num_bands, first_band: 0 }
}

/// Edges: no first keys and first keys of more than a tile, a window of one key and one longer than the row, bands that
/// reach over the begin of their document, bands away from the window, fewer bands than heads, and no band.
const EDGES: [Draw; 7] = [
    Draw { seq_len: 300, heads: [4, 2], window: 1, far: far(0, [1, 300], 2), cuts: Cuts::Count(1) },
    Draw { seq_len: 401, heads: [4, 2], window: 64, far: far(130, [64, 200], 2), cuts: Cuts::Few },
    Draw { seq_len: 257, heads: [6, 3], window: 600, far: far(5, [600, 700], 3), cuts: Cuts::Count(1) },
    Draw { seq_len: 400, heads: [4, 4], window: 17, far: far(3, [40, 400], 2), cuts: Cuts::Count(2) },
    Draw { seq_len: 191, heads: [2, 1], window: 7, far: far(64, [7, 7], 1), cuts: Cuts::Mixed },
    Draw { seq_len: 513, heads: [2, 2], window: 33, far: far(20, [33, 450], 2), cuts: Cuts::Mixed },
    Draw { seq_len: 65, heads: [3, 1], window: 2, far: far(1, [3, 4], 1), cuts: Cuts::Tokens },
];

/// A row of more than one chunk of the queries that see first keys (`kernels/common/sink_chunk.cuh`), which its second
/// document reaches over, from the middle of a tile on.
const LONG: Draw =
    Draw { seq_len: 4500, heads: [2, 1], window: 100, far: far(64, [100, 3000], 1), cuts: Cuts::Count(2) };

/// Rows that blocks of threads wait for each other in.
const REPEATED: [(Draw, usize); 3] = [
    (Draw { seq_len: 9000, heads: [4, 2], window: 300, far: far(64, [300, 5000], 2), cuts: Cuts::Count(1) }, 128),
    (Draw { seq_len: 9000, heads: [2, 2], window: 128, far: far(200, [1000, 9000], 2), cuts: Cuts::Few }, 64),
    (Draw { seq_len: 3000, heads: [8, 1], window: 1, far: far(0, [1, 900], 1), cuts: Cuts::Count(2) }, 128),
];

impl Draw {
    /// Draws sizes that no tile divides, and sizes at the edges of tiles.
    pub(crate) fn random(extent: &Extent, random: &mut Random) -> Self {
        let drawn = random.between(2, extent.longest.max(3));
        let seq_len = random.one_of(&[1, 15, 63, 64, 65, 127, 129, drawn, drawn, drawn]);
        let num_kv_heads = random.between(1, 4);
        let window = random.one_of(&[1, 2, 7, 33, 64, 100, seq_len / 2 + 1, seq_len, 5 * seq_len]);
        let first = random.one_of(&[window, window, window, window + 40, seq_len / 3]);
        let last = first + random.one_of(&[0, 1, 5, 64, seq_len / 2, seq_len, 3 * seq_len]);
        let num_bands = random.between(1, num_kv_heads + 1);
        Self {
            seq_len,
            heads: [num_kv_heads * random.one_of(extent.pick(&[2], &[1, 2, 3, 4])), num_kv_heads],
            window,
            far: FarKeys {
                sink_tokens: random.one_of(&[0, 1, 4, 64, 130, seq_len]),
                distances: [first, last],
                num_bands,
                first_band: random.below(num_bands),
            },
            cuts: random.one_of(&[Cuts::Count(1), Cuts::Count(1), Cuts::Few, Cuts::Mixed, Cuts::Tokens]),
        }
    }

    /// The same for rows of one document.
    pub(crate) fn of_one_document(self) -> Self {
        Self { cuts: Cuts::Count(1), ..self }
    }

    fn shape(&self, width: usize) -> AttentionShape {
        let batch = if self.seq_len < 130 { 2 } else { 1 };
        AttentionShape::new(batch, self.seq_len, self.heads, [width; 2])
    }

    pub(crate) fn case(&self, width: usize, seed: u64, extent: &Extent) -> Result<Case> {
        let keys = Keys::Far(self.window, self.far);
        let case = Case::draw(self.shape(width), keys, self.cuts, &Scores::Independent, seed)?;
        Ok(case.under(extent.policy))
    }
}

/// Checks forward and backward passes in both orders of sums.
pub(crate) fn check_wrappers(report: &mut Report, device: &dyn Device, extent: &Extent) -> Result<()> {
    let mut random = Random(extent.seed);
    let widths: &[usize] = if extent.is_emulated { &EMULATED } else { &WIDTHS };
    let of_long_rows = if extent.has_long_rows() { 1 } else { 0 };
    let edges = EDGES.into_iter().chain([LONG].into_iter().take(of_long_rows));
    let draws: Vec<Draw> = edges.chain((0..extent.few()).map(|_| Draw::random(extent, &mut random))).collect();
    for (at, draw) in draws.iter().enumerate() {
        let (width, seed) = (widths[at % widths.len()], extent.seed + at as u64);
        let magnitude = extent.magnitude_of(at);
        let case = draw.case(width, seed, extent)?.magnified(magnitude);
        let layout = Layout::ALL[at % Layout::ALL.len()];
        let mut case = case;
        if layout == Layout::Expanded {
            case.repeat_first_row();
        }
        let [num_heads, num_kv_heads] = draw.heads;
        let label = format!(
            "seq_len={},heads={num_heads},kv_heads={num_kv_heads},head_dim={width} {} {:?} {layout:?} q, k x \
             {magnitude} seed {seed}",
            draw.seq_len, case.keys, draw.cuts,
        );
        let name = case.keys.name_of("attention");
        check_wrapper(report, &name, &Prepared::new(case, layout, label), device, |_| Ok(None));
    }
    if extent.is_emulated {
        return Ok(());
    }
    for (draw, width) in &REPEATED {
        let case = draw.case(*width, extent.seed, extent)?;
        let call = OnDevice::new(&case, device);
        let outcome = || -> Outcome {
            let result = call.forward(None)?;
            repeat(|| call.gradients(None, &result, SumOrder::Fixed))?;
            orders_agree(&call)
        };
        let label = format!("{} tokens, heads {:?}, width {width}, {}", draw.seq_len, draw.heads, case.keys);
        let path = on_device::family(&case, device);
        report.add_wrapper("attention, bands, fixed order, repeated", path, &label, outcome());
    }
    Ok(())
}

/// Every specialisation that the check launches.
pub(crate) fn kernels(gpu: &DeviceReport) -> NeededKernels {
    let mut list = NeededKernels::default();
    for width in WIDTHS {
        add_attention(&mut list, gpu, AttentionShape::new(1, 1, [2, 1], [width; 2]), &[NeededKeys::Bands]);
    }
    for width in TOKEN_WIDTHS {
        let shape = AttentionShape::new(1, 1, [2, 1], [width; 2]);
        let needs = AttentionNeeds { shape, keys: NeededKeys::Bands, order: SumOrder::Any, has_sinks: true };
        list.extend(needs.decoding(&gpu.arch()));
    }
    list
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    /// Headers whose index arithmetic the Hopper kernels share with the portable ones.
    const HEADERS: [&str; 2] = [
        include_str!("../../../../kernels/common/far_keys.cuh"),
        include_str!("../../../../kernels/common/sink_chunk.cuh"),
    ];
    const PROGRAM: &str = include_str!("../../../../tests/gpu/emulator/far_tiles.cpp");
    /// What the headers use of C++ and of CUDA.
    const BEFORE: &str = r"
        #include <algorithm>
        #include <cstdio>
        #include <cstdlib>
        #include <vector>
        using std::max;
        using std::min;
        typedef unsigned u32;
        typedef unsigned long long u64;
        typedef int i32;
        #define DEVICE inline
        struct { int x; } threadIdx;
        inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
        inline int __popc(u32 x) { return __builtin_popcount(x); }
        inline u32 __ballot_sync(u32, bool x) { return x; }
    ";

    #[test]
    fn tiles_hold_a_seen_pair_and_blocks_never_wait_for_each_other() {
        let own = |line: &&str| !line.starts_with("#include") && !line.starts_with("#pragma");
        let headers = HEADERS.map(|text| text.lines().filter(own).collect::<Vec<_>>().join("\n")).join("\n");
        let text = PROGRAM.replace("// HEADERS\n", &format!("{BEFORE}\n{headers}\n"));
        let folder = std::env::temp_dir().join(format!("sieve-far-tiles-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let [source, program] = ["far_tiles.cpp", "far_tiles"].map(|name| folder.join(name));
        std::fs::write(&source, text).expect("written");
        let built = Command::new("g++").args(["-std=c++17", "-O1", "-w", "-o"]).args([&program, &source]).output();
        let built = built.expect("g++ starts");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let ran = Command::new(&program).output().expect("it starts");
        assert_eq!(String::from_utf8_lossy(&ran.stdout), "good\n");
        std::fs::remove_dir_all(&folder).expect("removed");
    }
}
