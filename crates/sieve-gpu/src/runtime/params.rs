//! The params structs of the kernels. Each is declared once, in a `.cu` file or in a header; `build.rs` generates the
//! Rust struct from that text. A launch names every field, so it cannot forget or misplace one.
use crate::KernelError;

/// One field of a params struct, 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(u64);

impl From<u64> for Word {
    fn from(value: u64) -> Self {
        Self(value)
    }
}

impl From<usize> for Word {
    fn from(value: usize) -> Self {
        Self(value as u64)
    }
}

impl From<u32> for Word {
    fn from(value: u32) -> Self {
        Self(u64::from(value))
    }
}

impl From<bool> for Word {
    fn from(value: bool) -> Self {
        Self(u64::from(value))
    }
}

/// The bits of an f32, which a kernel reads with `f32_word`.
impl From<f32> for Word {
    fn from(value: f32) -> Self {
        Self(u64::from(value.to_bits()))
    }
}

/// A params struct, which a launch passes to its kernel by value.
pub(crate) trait Params {
    /// Name of the struct in the `.cu` file.
    const NAME: &'static str;

    /// Appends the fields in the order of the struct.
    fn append(&self, words: &mut Vec<u64>);
}

/// A params struct by the names of its fields: `params!(ScaleParams { width, stride: rows.stride })`. `{ rows, width }:
/// x` takes the fields `rows` and `width` from fields of `x` with the same names; `[offset, token_stride]: place` takes
/// them from the first elements of an array.
macro_rules! params {
    ($name:ident { $($words:tt)* }) => {
        $crate::runtime::params::params!(@words $name [] {} $($words)*)
    };
    (@words $name:ident [$($arrays:tt)*] {$($done:tt)*}) => {{
        $($arrays)*
        $crate::runtime::params::$name { $($done)* }
    }};
    (@words $name:ident [$($arrays:tt)*] {$($done:tt)*} { $($word:ident),+ }: $of:expr $(, $($rest:tt)*)?) => {
        $crate::runtime::params::params!(@words $name [$($arrays)*] {
            $($done)* $($word: ::core::convert::Into::into($of.$word),)+
        } $($($rest)*)?)
    };
    (@words $name:ident [$($arrays:tt)*] {$($done:tt)*} [ $($word:ident),+ ]: $of:expr $(, $($rest:tt)*)?) => {
        $crate::runtime::params::params!(@words $name [$($arrays)* let [$($word,)+ ..] = $of;] {
            $($done)* $($word: ::core::convert::Into::into($word),)+
        } $($($rest)*)?)
    };
    (@words $name:ident $arrays:tt {$($done:tt)*} $word:ident $(: $value:expr)? $(, $($rest:tt)*)?) => {
        $crate::runtime::params::params!(@words $name $arrays {
            $($done)* $word: ::core::convert::Into::into($crate::runtime::params::params!(@value $word $($value)?)),
        } $($($rest)*)?)
    };
    (@value $word:ident $value:expr) => { $value };
    (@value $word:ident) => { $word };
}
pub(crate) use params;

include!(concat!(env!("OUT_DIR"), "/kernel_params.rs"));

/// The 64-bit words of a params struct for an entry point.
///
/// # Errors
/// [`KernelError::Launch`] when the entry point takes another struct.
pub(crate) fn words_for<P: Params>(entry: &'static str, params: &P) -> Result<Vec<u64>, KernelError> {
    let at = ENTRY_PARAMS.binary_search_by_key(&entry, |(known, _)| known);
    let declared = at.map_or("no struct", |at| ENTRY_PARAMS[at].1);
    if declared != P::NAME {
        return Err(KernelError::Launch {
            kernel: entry,
            reason: format!("it takes {declared} and was given {}", P::NAME),
        });
    }
    let mut words = Vec::new();
    params.append(&mut words);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::KernelText;

    #[test]
    fn words_come_in_the_order_of_the_struct() {
        let base = params!(AttentionParams {
            v_batch_stride: 13usize,
            k_batch_stride: 12usize,
            q_batch_stride: 11usize,
            v_token_stride: 10usize,
            k_token_stride: 9usize,
            q_token_stride: 8usize,
            v_offset: 7usize,
            k_offset: 6usize,
            q_offset: 5usize,
            num_kv_heads: 4usize,
            num_heads: 3usize,
            seq_len: 2usize,
            batch: 1usize,
        });
        let softmax_scale = 1.0f32;
        let base = params!(AttentionForwardParams { softmax_scale, window: 14usize, base });
        let params = params!(AttentionFarForwardParams {
            base,
            sink_tokens: 16usize,
            first_distance: 17usize,
            last_distance: 18usize,
            num_bands: 19usize,
            first_band: 20usize,
        });
        let words = words_for("attention_forward", &params).expect("its own struct");
        assert_eq!(words[..14], (1..=14).collect::<Vec<u64>>());
        assert_eq!(words[14..], [0x3f80_0000, 16, 17, 18, 19, 20], "an f32's bits are the low half of a word");
    }

    #[test]
    fn another_kernels_struct_is_refused() {
        let params = params!(FillZeroParams { num_elements: 4usize });
        let error = words_for("split_master", &params).expect_err("another struct").to_string();
        assert!(error.contains("SplitMasterParams") && error.contains("FillZeroParams"), "{error}");
    }

    #[test]
    fn every_kernel_declares_its_params() {
        for file in KernelText::files().filter_map(|file| file.strip_suffix(".cu")) {
            assert!(ENTRY_PARAMS.iter().any(|(entry, _)| *entry == file), "{file}");
        }
    }
}
