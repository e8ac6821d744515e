//! `--shape batch=2,seq_len=300,heads=4,kv_heads=2,head_dim=64`.
use sieve_kernels::AttentionShape;
use std::str::FromStr;

/// Sizes of a call: query and KV heads, width of keys and of values.
pub(crate) fn attention_shape(
    batch: usize,
    seq_len: usize,
    [num_heads, num_kv_heads]: [usize; 2],
    [head_dim, head_dim_v]: [usize; 2],
) -> AttentionShape {
    AttentionShape {
        batch,
        seq_len,
        num_heads,
        num_kv_heads,
        head_dim,
        head_dim_v,
    }
}

/// Batch, tokens, query heads, KV heads, width of keys and of values.
pub(crate) fn sizes(shape: AttentionShape) -> [usize; 6] {
    [
        shape.batch,
        shape.seq_len,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.head_dim_v,
    ]
}

/// The keys of `--shape`; `batch`, `kv_heads` and `head_dim_v` may be left out.
const KEYS: &str = "batch, seq_len, heads, kv_heads, head_dim, head_dim_v";

/// Most elements of one tensor: far more than a test needs, and no overflow anywhere.
const MAX_ELEMENTS: usize = 1 << 34;

/// Sizes of a call, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaseShape(pub AttentionShape);

impl FromStr for CaseShape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let [
            mut batch,
            mut seq_len,
            mut heads,
            mut kv_heads,
            mut head_dim,
            mut head_dim_v,
        ] = [None; 6];
        for pair in text.split(',').filter(|pair| !pair.trim().is_empty()) {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| format!("'{pair}' is not of the form key=number"))?;
            let place = match key.trim() {
                "batch" => &mut batch,
                "seq_len" => &mut seq_len,
                "heads" => &mut heads,
                "kv_heads" => &mut kv_heads,
                "head_dim" => &mut head_dim,
                "head_dim_v" => &mut head_dim_v,
                other => return Err(format!("there is no key {other}; the keys are {KEYS}")),
            };
            let number = value
                .trim()
                .parse::<usize>()
                .ok()
                .filter(|&number| number > 0)
                .ok_or_else(|| format!("{key}={value}: a whole number above 0 is needed"))?;
            if place.replace(number).is_some() {
                return Err(format!("{key} is given twice"));
            }
        }
        let required =
            |name: &str, value: Option<usize>| value.ok_or_else(|| format!("{name} is missing; the keys are {KEYS}"));
        let (seq_len, num_heads) = (required("seq_len", seq_len)?, required("heads", heads)?);
        let head_dim = required("head_dim", head_dim)?;
        Self::checked(AttentionShape {
            batch: batch.unwrap_or(1),
            seq_len,
            num_heads,
            num_kv_heads: kv_heads.unwrap_or(num_heads),
            head_dim,
            head_dim_v: head_dim_v.unwrap_or(head_dim),
        })
    }
}

impl CaseShape {
    fn checked(shape: AttentionShape) -> Result<Self, String> {
        let [_, _, num_heads, num_kv_heads, head_dim, head_dim_v] = sizes(shape);
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(format!("kv_heads={num_kv_heads} does not divide heads={num_heads}"));
        }
        if head_dim_v > head_dim {
            return Err(format!("head_dim_v={head_dim_v} is wider than head_dim={head_dim}"));
        }
        let elements = [shape.batch, shape.seq_len, num_heads + 2 * num_kv_heads, head_dim]
            .iter()
            .try_fold(1usize, |product, &size| product.checked_mul(size));
        match elements {
            Some(elements) if elements <= MAX_ELEMENTS => Ok(Self(shape)),
            _ => Err("the tensors would have more than 2^34 elements".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_has_its_defaults() {
        let CaseShape(shape) = "seq_len=300, heads=4,head_dim=64".parse().expect("complete");
        assert_eq!(
            (shape.batch, shape.seq_len, shape.num_heads, shape.num_kv_heads),
            (1, 300, 4, 4)
        );
        assert_eq!((shape.head_dim, shape.head_dim_v), (64, 64));
    }

    #[test]
    fn mistakes_are_named() {
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
