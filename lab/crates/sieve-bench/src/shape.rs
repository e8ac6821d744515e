//! Parses `--shape batch=2,seq_len=300,heads=4,kv_heads=2,head_dim=64`.
use sieve_core::NsaBlocks;
use sieve_kernels::AttentionShape;
use sieve_select::CallShape;
use std::str::FromStr;

/// Shape of queries and of their gradient.
pub(crate) fn queries_of(shape: AttentionShape) -> [usize; 4] {
    [shape.batch, shape.seq_len, shape.num_heads, shape.head_dim]
}

/// Shape of keys and of their gradient.
pub(crate) fn keys_of(shape: AttentionShape) -> [usize; 4] {
    [shape.batch, shape.seq_len, shape.num_kv_heads, shape.head_dim]
}

/// Shape of values and of their gradient.
pub(crate) fn values_of(shape: AttentionShape) -> [usize; 4] {
    [shape.batch, shape.seq_len, shape.num_kv_heads, shape.head_dim_v]
}

/// Shape of packed queries, keys and values; values are as wide as keys.
pub(crate) fn packed_of(shape: AttentionShape) -> [usize; 4] {
    let heads = shape.num_heads + 2 * shape.num_kv_heads;
    [shape.batch, shape.seq_len, heads, shape.head_dim]
}

/// The shape of a whole prompt for sieve-select.
pub(crate) fn prompt_shape(shape: &AttentionShape) -> CallShape {
    let heads = [shape.num_heads, shape.num_kv_heads];
    CallShape::new([shape.seq_len; 2], heads, shape.head_dim)
}

/// The attention shape of a selector's call, with as many tokens as it has keys.
pub(crate) fn shape_of_call(call: CallShape) -> AttentionShape {
    let heads = [call.num_heads, call.num_kv_heads];
    AttentionShape::new(1, call.num_keys, heads, [call.head_dim; 2])
}

/// The keys of `--shape`; `batch`, `kv_heads` and `head_dim_v` may be left out.
const KEYS: [&str; 6] = ["batch", "seq_len", "heads", "kv_heads", "head_dim", "head_dim_v"];

/// Most elements of one tensor; at this size no index overflows.
const MAX_ELEMENTS: usize = 1 << 34;

/// Checked sizes of an attention call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaseShape(pub AttentionShape);

impl FromStr for CaseShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut sizes = [None; KEYS.len()];
        for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| format!("'{pair}' is not of the form key=number"))?;
            let place = KEYS.iter().position(|known| *known == key.trim());
            let place =
                place.ok_or_else(|| format!("there is no key {}; the keys are {}", key.trim(), KEYS.join(", ")))?;
            let number = value.trim().parse::<usize>().ok();
            let number = number.filter(|&number| number > 0);
            let number = number.ok_or_else(|| format!("{key}={value}: a whole number above 0 is needed"))?;
            if sizes[place].replace(number).is_some() {
                return Err(format!("{key} is given twice"));
            }
        }
        let required = |at: usize| {
            let missing = || format!("{} is missing; the keys are {}", KEYS[at], KEYS.join(", "));
            sizes[at].ok_or_else(missing)
        };
        let [batch, _, _, kv_heads, _, head_dim_v] = sizes;
        let (seq_len, heads, head_dim) = (required(1)?, required(2)?, required(4)?);
        Self::checked(AttentionShape::new(
            batch.unwrap_or(1),
            seq_len,
            [heads, kv_heads.unwrap_or(heads)],
            [head_dim, head_dim_v.unwrap_or(head_dim)],
        ))
    }
}

impl CaseShape {
    /// Refuses KV heads that do not divide the heads, values wider than keys, and more than [`MAX_ELEMENTS`] elements
    /// in packed q, k and v, the largest tensor.
    fn checked(shape: AttentionShape) -> Result<Self, String> {
        let AttentionShape { num_heads, num_kv_heads, head_dim, head_dim_v, .. } = shape;
        if !num_heads.is_multiple_of(num_kv_heads) {
            let words = format!("kv_heads={num_kv_heads} does not divide heads={num_heads}");
            return Err(words);
        }
        if head_dim_v > head_dim {
            let words = format!("head_dim_v={head_dim_v} is wider than head_dim={head_dim}");
            return Err(words);
        }
        let mut sizes = packed_of(shape).into_iter();
        let elements = sizes.try_fold(1usize, |product, size| product.checked_mul(size));
        match elements {
            Some(elements) if elements <= MAX_ELEMENTS => Ok(Self(shape)),
            _ => Err("the tensors would have more than 2^34 elements".to_owned()),
        }
    }
}

/// `--heads 32/4`: query and KV heads of a benchmark's rows, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BenchHeads(pub [usize; 2]);

impl FromStr for BenchHeads {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let counts = text.split_once('/').map(|(q, kv)| [q, kv].map(|count| count.trim().parse().unwrap_or(0)));
        match counts {
            Some([q, kv]) if kv > 0 && q > 0 && q % kv == 0 => Ok(Self([q, kv])),
            _ => Err("query heads and KV heads that divide them are needed, as in 32/4".to_owned()),
        }
    }
}

/// NSA's blocks as in `--blocks 32,16,64,16`: size of a compressed block, stride, size of a selected block, in tokens,
/// and number of blocks that a query selects. `from_str` checks them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaseBlocks(pub NsaBlocks);

impl FromStr for CaseBlocks {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // A size that does not parse is left out, so that fewer than four are left.
        let sizes: Vec<usize> = text.split(',').filter_map(|size| size.trim().parse().ok()).collect();
        let Ok([compressed, stride, selected, count]) = <[usize; 4]>::try_from(sizes) else {
            return Err("four whole numbers are needed: compressed block, stride, selected block, blocks".to_owned());
        };
        if [compressed, stride, selected, count].contains(&0) {
            return Err("a size is 0".to_owned());
        }
        if [compressed, selected].iter().any(|size| !size.is_multiple_of(stride)) {
            return Err(format!("a stride of {stride} does not divide both block sizes"));
        }
        Ok(Self(NsaBlocks::of([compressed, stride, selected, count])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_has_its_defaults() {
        let CaseShape(shape) = "seq_len=300, heads=4,head_dim=64".parse().expect("complete");
        assert_eq!((shape.batch, shape.seq_len, shape.num_heads, shape.num_kv_heads), (1, 300, 4, 4));
        assert_eq!((shape.head_dim, shape.head_dim_v), (64, 64));
    }

    #[test]
    fn each_mistake_in_a_shape_is_refused_by_name() {
        for (text, word) in [
            ("seq_len=3,heads=4", "head_dim is missing"),
            ("seqlen=3", "no key seqlen"),
            ("seq_len=0,heads=1,head_dim=16", "seq_len=0"),
            ("seq_len=x,heads=1,head_dim=16", "seq_len=x"),
            ("seq_len=3,heads=4,kv_heads=3,head_dim=16", "does not divide"),
            ("seq_len=3,seq_len=3", "twice"),
            ("seq_len", "key=number"),
            ("seq_len=3,heads=1,head_dim=16,head_dim_v=32", "wider"),
            ("seq_len=99999999999,heads=1,head_dim=16", "2^34"),
        ] {
            let error = text.parse::<CaseShape>().expect_err(text);
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
