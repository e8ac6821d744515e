//! GPUs by name: peak rate, memory and bandwidth from the vendors' data sheets.

use crate::did_you_mean;
use serde::Serialize;

/// Name and properties of a GPU model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// The name that [`find`] was called with.
    pub name: String,
    /// Peak dense bf16 rate in FLOP/s: tensor cores, f32 accumulation, no sparsity.
    pub bf16_flops: f64,
    /// Memory in bytes that a run may take; all of it unless a device said what is free.
    pub memory_bytes: u64,
    /// All memory in bytes; the larger size if the model is sold with two. The allocator's pages are parts of it.
    pub total_memory_bytes: u64,
    /// Peak memory bandwidth in bytes per second.
    pub memory_bytes_per_second: f64,
    /// The architecture that kernels are compiled for, as `sm_80` or `sm_90a`.
    pub arch: String,
}

impl Gpu {
    /// Whether the GPU runs the `sm_90a` kernels.
    pub fn is_hopper(&self) -> bool {
        self.arch == "sm_90a"
    }
}

/// Finds a GPU by a name as a driver (`NVIDIA H200`) or a person (`h200`, `3090`) writes it. `None` if it is not in the
/// list.
pub fn find(name: &str) -> Option<Gpu> {
    let upper = name.to_ascii_uppercase();
    let in_a_word = |letter: &char| letter.is_ascii_alphanumeric();
    let words: Vec<&str> = upper.split(|letter| !in_a_word(&letter)).collect();
    let without_spaces: String = upper.chars().filter(in_a_word).collect();
    // Whether the name is a row's words written as one word, with or without "RTX": "RTX3090TI" or "3090ti".
    let is_one_word = |row_words: &[&str]| {
        let row = row_words.concat();
        without_spaces == row || Some(without_spaces.as_str()) == row.strip_prefix("RTX")
    };
    let row = GPUS
        .iter()
        .find(|(row_words, ..)| row_words.iter().all(|word| words.contains(word)))
        .or_else(|| GPUS.iter().find(|(row_words, ..)| is_one_word(row_words)))?;
    let (_, peak, gigabytes, bandwidth, arch) = row;
    Some(Gpu {
        name: name.to_owned(),
        bf16_flops: *peak,
        memory_bytes: gigabytes * 1_000_000_000,
        total_memory_bytes: gigabytes * 1_000_000_000,
        memory_bytes_per_second: *bandwidth as f64 * 1e9,
        arch: (*arch).to_owned(),
    })
}

/// All names that [`find`] knows, in lower case.
pub fn names() -> Vec<String> {
    let names = GPUS.iter().map(|(marks, ..)| marks.join(" "));
    names.map(|name| name.to_ascii_lowercase()).collect()
}

/// The end of a sentence about a name that [`find`] does not know: that the GPU is too old, or the most similar known
/// name, or nothing.
pub fn why_not(name: &str) -> String {
    let upper = name.to_ascii_uppercase();
    if BEFORE_AMPERE.iter().any(|old| upper.contains(old)) {
        return ": it is older than Ampere, and the kernels need compute capability 8.0".to_owned();
    }
    let names = names();
    did_you_mean(name, &names.iter().map(String::as_str).collect::<Vec<_>>())
}

/// Parts of the names of GPUs without bf16 tensor cores.
const BEFORE_AMPERE: &[&str] = &["V100", "T4", "P100", "P40", "TITAN", "2060", "2070", "2080", "GTX", "1080", "K80"];

/// Peak dense bf16 rate of a GPU in FLOP/s, by the driver's name for it; `None` if the GPU is not in the list.
pub fn peak_bf16_flops(device_name: &str) -> Option<f64> {
    find(device_name).map(|gpu| gpu.bf16_flops)
}

/// Words of a device's name, peak FLOP/s, memory in GB, bandwidth in GB/s, architecture. An H200's memory is what its
/// driver says, 139.8 GiB, not the 141 GB of its name. [`find`] takes the first row
/// whose words all occur in the name.
type Row = (&'static [&'static str], f64, u64, u64, &'static str);
const GPUS: &[Row] = &[
    (&["B200"], 2250e12, 180, 8000, "sm_100a"),
    (&["GH200"], 989e12, 96, 4000, "sm_90a"),
    (&["H200", "NVL"], 835e12, 150, 4800, "sm_90a"),
    (&["H200"], 989e12, 150, 4800, "sm_90a"),
    (&["H100", "NVL"], 835e12, 94, 3900, "sm_90a"),
    (&["H100", "PCIE"], 756e12, 80, 2000, "sm_90a"),
    (&["H100"], 989e12, 80, 3350, "sm_90a"),
    (&["H800", "PCIE"], 756e12, 80, 2000, "sm_90a"),
    (&["H800"], 989e12, 80, 3350, "sm_90a"),
    (&["H20"], 148e12, 96, 4000, "sm_90a"),
    (&["A100"], 312e12, 80, 2039, "sm_80"),
    (&["A800"], 312e12, 80, 2039, "sm_80"),
    (&["A30"], 165e12, 24, 933, "sm_80"),
    (&["A40"], 149.7e12, 48, 696, "sm_86"),
    (&["A10"], 125e12, 24, 600, "sm_86"),
    (&["A10G"], 70e12, 24, 600, "sm_86"),
    (&["L40S"], 362e12, 48, 864, "sm_89"),
    (&["L40"], 181e12, 48, 864, "sm_89"),
    (&["L4"], 121e12, 24, 300, "sm_89"),
    (&["RTX", "6000", "ADA"], 364.2e12, 48, 960, "sm_89"),
    (&["RTX", "A6000"], 154.8e12, 48, 768, "sm_86"),
    (&["RTX", "5090"], 209.5e12, 32, 1792, "sm_120a"),
    (&["RTX", "5080"], 112.6e12, 16, 960, "sm_120a"),
    (&["RTX", "4090"], 165.2e12, 24, 1008, "sm_89"),
    (&["RTX", "4080"], 97.5e12, 16, 717, "sm_89"),
    (&["RTX", "3090", "TI"], 80e12, 24, 1008, "sm_86"),
    (&["RTX", "3090"], 71e12, 24, 936, "sm_86"),
    (&["RTX", "3080", "TI"], 68.5e12, 12, 912, "sm_86"),
    (&["RTX", "3080"], 59.5e12, 10, 760, "sm_86"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_are_found_by_the_drivers_names() {
        for (name, peak) in [
            ("NVIDIA H200", Some(989e12)),
            ("NVIDIA H200 NVL", Some(835e12)),
            ("NVIDIA H100 80GB HBM3", Some(989e12)),
            ("NVIDIA H100 PCIe", Some(756e12)),
            ("NVIDIA A100-SXM4-80GB", Some(312e12)),
            ("NVIDIA GeForce RTX 4090", Some(165.2e12)),
            ("NVIDIA GeForce RTX 3090 Ti", Some(80e12)),
            ("NVIDIA RTX 6000 Ada Generation", Some(364.2e12)),
            ("NVIDIA L4", Some(121e12)),
            ("NVIDIA L40S", Some(362e12)),
            ("NVIDIA A10G", Some(70e12)),
            ("Tesla V100-SXM2-16GB", None),
            ("", None),
        ] {
            assert_eq!(peak_bf16_flops(name), peak, "{name}");
        }
    }

    #[test]
    fn hopper_is_known_by_name() {
        let is_hopper = |name| find(name).map(|gpu| gpu.is_hopper());
        for name in ["NVIDIA H100 80GB HBM3", "h200", "H20", "NVIDIA GH200 480GB"] {
            assert_eq!(is_hopper(name), Some(true), "{name}");
        }
        for name in ["a100", "L4", "B200", "rtx 4090"] {
            assert_eq!(is_hopper(name), Some(false), "{name}");
        }
    }

    #[test]
    fn short_names_that_people_write_are_found() {
        let h200 = find("h200").expect("known");
        assert_eq!((h200.bf16_flops, h200.memory_bytes), (989e12, 150_000_000_000));
        assert_eq!(find("rtx 4090").map(|gpu| gpu.bf16_flops), Some(165.2e12));
        for name in ["3090", "rtx3090", "RTX-3090", "GeForce RTX 3090"] {
            assert_eq!(find(name).map(|gpu| gpu.memory_bytes), Some(24_000_000_000), "{name}");
            assert_eq!(find(name).map(|gpu| gpu.bf16_flops), Some(71e12), "{name}");
        }
        assert_eq!(find("3090ti").map(|gpu| gpu.bf16_flops), Some(80e12));
        assert_eq!(find("a6000").expect("known").arch, "sm_86");
        for name in ["h2000", "309", "rtx", ""] {
            assert_eq!(find(name), None, "{name}");
        }
        assert_eq!(why_not("h2000"), ", did you mean h200?");
        assert_eq!(why_not("rtx 5900"), ", did you mean rtx 5090?");
        assert_eq!(why_not("no such"), "");
        for old in ["Tesla V100-SXM2-16GB", "t4", "rtx 2080 ti"] {
            assert!(why_not(old).contains("older than Ampere"), "{old}");
        }
        for name in names() {
            assert!(find(&name).is_some(), "{name}");
        }
    }
}
