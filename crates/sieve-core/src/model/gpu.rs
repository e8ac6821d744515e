//! GPUs by name: peak rate, memory and its bandwidth, by the vendors' data sheets.

use serde::Serialize;

/// One model of GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Gpu {
    /// Its name as asked for.
    pub name: String,
    /// Peak dense bf16 rate in FLOP/s: tensor cores, f32 accumulation, no sparsity.
    pub bf16_flops: f64,
    /// Memory in bytes. Of a model sold with two sizes, the larger.
    pub memory_bytes: u64,
    /// Peak bandwidth of that memory in bytes a second.
    pub memory_bytes_per_second: f64,
}

impl Gpu {
    /// Whether it has the tensor cores that the `sm_90a` kernels are written for.
    pub fn is_hopper(&self) -> bool {
        let upper = self.name.to_ascii_uppercase();
        let mut words = upper.split(|letter: char| !letter.is_ascii_alphanumeric());
        words.any(|word| HOPPER.contains(&word))
    }
}

/// Words in the names of Hopper GPUs.
const HOPPER: &[&str] = &["H100", "H200", "H800", "H20", "GH200"];

/// The GPU whose words are in `name`, as a driver (`NVIDIA H200`) or a person (`h200`) writes it.
///
/// `None` for one that is not in the list; no guess is made.
pub fn find(name: &str) -> Option<Gpu> {
    let upper = name.to_ascii_uppercase();
    let words = upper
        .split(|letter: char| !letter.is_ascii_alphanumeric())
        .collect::<Vec<_>>();
    let (_, peak, gigabytes, bandwidth) = GPUS
        .iter()
        .find(|(marks, ..)| marks.iter().all(|mark| words.contains(mark)))?;
    Some(Gpu {
        name: name.to_owned(),
        bf16_flops: *peak,
        memory_bytes: gigabytes * 1_000_000_000,
        memory_bytes_per_second: *bandwidth as f64 * 1e9,
    })
}

/// Names [`find`] knows, lower case.
pub fn names() -> Vec<String> {
    let names = GPUS.iter().map(|(marks, ..)| marks.join(" "));
    names.map(|name| name.to_ascii_lowercase()).collect()
}

/// Peak dense bf16 rate of a GPU in FLOP/s, by the name the driver gives; `None` where it is not known.
pub fn peak_bf16_flops(device_name: &str) -> Option<f64> {
    find(device_name).map(|gpu| gpu.bf16_flops)
}

/// Words of a device's name, peak FLOP/s, memory in GB, bandwidth in GB/s; the first row whose words are all there
/// counts.
const GPUS: &[(&[&str], f64, u64, u64)] = &[
    (&["B200"], 2250e12, 180, 8000),
    (&["GH200"], 989e12, 96, 4000),
    (&["H200", "NVL"], 835e12, 141, 4800),
    (&["H200"], 989e12, 141, 4800),
    (&["H100", "NVL"], 835e12, 94, 3900),
    (&["H100", "PCIE"], 756e12, 80, 2000),
    (&["H100"], 989e12, 80, 3350),
    (&["H800", "PCIE"], 756e12, 80, 2000),
    (&["H800"], 989e12, 80, 3350),
    (&["H20"], 148e12, 96, 4000),
    (&["A100"], 312e12, 80, 2039),
    (&["A800"], 312e12, 80, 2039),
    (&["A30"], 165e12, 24, 933),
    (&["A40"], 149.7e12, 48, 696),
    (&["A10"], 125e12, 24, 600),
    (&["A10G"], 70e12, 24, 600),
    (&["L40S"], 362e12, 48, 864),
    (&["L40"], 181e12, 48, 864),
    (&["L4"], 121e12, 24, 300),
    (&["RTX", "6000", "ADA"], 364.2e12, 48, 960),
    (&["RTX", "A6000"], 154.8e12, 48, 768),
    (&["RTX", "4090"], 165.2e12, 24, 1008),
    (&["RTX", "3090", "TI"], 80e12, 24, 1008),
    (&["RTX", "3090"], 71e12, 24, 936),
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
    fn people_write_short_names() {
        let h200 = find("h200").expect("known");
        assert_eq!(
            (h200.bf16_flops, h200.memory_bytes),
            (989e12, 141_000_000_000)
        );
        assert_eq!(find("rtx 4090").map(|gpu| gpu.bf16_flops), Some(165.2e12));
        assert_eq!(find("h2000"), None);
        for name in names() {
            assert!(find(&name).is_some(), "{name}");
        }
    }
}
