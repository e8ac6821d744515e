//! A comparison that some versions of ptxas compile wrongly: of `max(min(a, b), 0)`, or `max(max(a, b), 0)`, with `a`
//! or `b` (`kernels/notes/bound-and-zero.md`). It is looked for in PTX, where such a register is assigned once.
use std::collections::HashMap;

/// Names each comparison of this kind in the PTX of a kernel, with the line of its source that PTX names before it.
pub(crate) fn found(ptx: &str) -> Vec<String> {
    // The operands of each `min` and `max`, and of the ones of these that were bounded by zero.
    let (mut pairs, mut bounded) = (HashMap::new(), HashMap::new());
    let (mut found, mut place) = (Vec::new(), "an unknown line");
    for line in ptx.lines().map(str::trim) {
        let (opcode, operands) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let operands: Vec<&str> = operands.trim_end_matches(';').split(',').map(str::trim).collect();
        match (opcode, operands.as_slice()) {
            (".loc", _) => place = line,
            ("max.s32", &[to, from, "0"] | &[to, "0", from]) if pairs.contains_key(from) => {
                bounded.insert(to, pairs[from]);
            }
            ("min.s32" | "max.s32", &[to, a, b]) => {
                pairs.insert(to, [a, b]);
            }
            ("setp.eq.s32" | "setp.ne.s32", &[_, x, y]) => {
                let is_of = |bound: &str, other: &str| bounded.get(bound).is_some_and(|pair| pair.contains(&other));
                if is_of(x, y) || is_of(y, x) {
                    found.push(format!(
                        "{place}: `{line}` compares max(min(a, b), 0) with a or b, which ptxas may compile wrongly"
                    ));
                }
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_between_a_bound_and_zero_is_not_compared_with_the_bound() {
        let ptx = |compared: &str| {
            format!(
                ".loc 1 62 3\nmin.s32 \t%r155, %r616, %r154;\nmax.s32 \t%r156, %r155, 0;\n.loc 1 63 3\n{compared};\n"
            )
        };
        let wrong = found(&ptx("setp.eq.s32 \t%p54, %r156, %r154"));
        assert!(wrong.len() == 1 && wrong[0].contains("1 63 3"), "{wrong:?}");
        assert_eq!(found(&ptx("setp.ne.s32 \t%p54, %r616, %r156")).len(), 1, "the other number, on the other side");
        for right in ["setp.ge.s32 %p54, %r616, %r154", "setp.eq.s32 %p54, %r155, %r154", "setp.eq.s32 %p1, %r156, 0"] {
            assert!(found(&ptx(right)).is_empty(), "{right}");
        }
        let bound = "min.s32 %r4, %r3, 32;\nmax.s32 %r5, %r4, 0;\nsetp.eq.s32 %p1, %r5, 32;";
        assert_eq!(found(bound).len(), 1, "a number in the instruction");
        assert!(found("max.s32 %r4, %r3, 0;\nmin.s32 %r5, %r4, 32;\nsetp.eq.s32 %p1, %r5, 32;").is_empty());
    }
}
