//! The keys of earlier parts that a part's queries may see.
use super::RowParts;
use std::cmp::Ordering;
use std::ops::Range;

/// How many keys before a part its queries may see.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reach {
    /// The best-ranked ones.
    pub(super) ranked: usize,
    /// The last ones, whatever their rank.
    pub(super) recent: usize,
}

/// Sizes of a packed tensor of one part, `[batch, len, num_heads + 2 * num_kv_heads, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) num_heads: usize,
    pub(super) num_kv_heads: usize,
    pub(super) head_dim: usize,
}

impl Sizes {
    fn packed(&self) -> usize {
        (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
    }

    /// Where a token's key and value of a head stand in its packed vector.
    fn key_and_value(&self, head: usize) -> [Range<usize>; 2] {
        [0, self.num_kv_heads].map(|further| {
            let first = (self.num_heads + further + head) * self.head_dim;
            first..first + self.head_dim
        })
    }
}

/// A key of this part that was given to a later one.
#[derive(Clone, Copy, Debug)]
struct Given {
    row: usize,
    head: usize,
    token: usize,
}

/// Keys before a part: as many slots for each row and head, those of a row with fewer keys left empty in front.
#[derive(Clone, Debug)]
pub(super) struct Border {
    parts: RowParts,
    sizes: Sizes,
    /// Slots of a row.
    pub(super) slots: usize,
    /// Empty slots by row.
    pads: Vec<usize>,
    /// K and V, `[batch, num_kv_heads, slots, 2, head_dim]`.
    keys: Vec<f32>,
    /// `[batch, num_kv_heads, slots]`.
    ranks: Vec<f32>,
    /// Positions in the whole row; `[batch, num_kv_heads, slots]`.
    #[cfg_attr(not(test), allow(dead_code))]
    pub(super) positions: Vec<Option<usize>>,
    /// Place among all keys that were received, part by part.
    places: Vec<Option<usize>>,
    /// Keys received from each part.
    received: Vec<usize>,
    /// Keys given to each part, in order.
    given: Vec<Vec<Given>>,
}

/// A key that was received.
#[derive(Clone, Copy)]
struct Found {
    position: usize,
    place: usize,
    rank: f32,
}

/// Larger rank first; of equal ones the later key.
fn best_first(one: (f32, usize), other: (f32, usize)) -> Ordering {
    let by_rank = other.0.partial_cmp(&one.0).unwrap_or(Ordering::Equal);
    by_rank.then(other.1.cmp(&one.1))
}

impl Border {
    /// Gives later parts the keys that they may see, and gets those that this part may see. `qkv` is this part's packed
    /// tensor, `ranks` `[batch, num_kv_heads, len]` what ranks its keys.
    pub(super) fn gather(
        parts: &RowParts,
        sizes: Sizes,
        reach: Reach,
        qkv: &[f32],
        ranks: Option<&[f32]>,
    ) -> Self {
        let (own, num_parts, len) = (parts.links.part(), parts.links.num_parts(), parts.len());
        let rank_of = |row: usize, head: usize, token: usize| {
            ranks.map_or(0.0, |ranks| {
                ranks[(row * sizes.num_kv_heads + head) * len + token]
            })
        };
        let mut values = vec![Vec::new(); num_parts];
        let mut given = vec![Vec::new(); num_parts];
        for to in own + 1..num_parts {
            for row in 0..parts.batch {
                let [ranked, recent] = spans(parts, reach, row, [own, to]);
                for head in 0..sizes.num_kv_heads {
                    let rank = |position: usize| rank_of(row, head, position - own * len);
                    let mut best = ranked.clone().collect::<Vec<_>>();
                    best.sort_by(|&a, &b| best_first((rank(a), a), (rank(b), b)));
                    best.truncate(reach.ranked);
                    best.sort_unstable();
                    for position in best.into_iter().chain(recent.clone()) {
                        let token = position - own * len;
                        // Exact up to 2^24 tokens of a part.
                        values[to].extend([token as f32, rank(position)]);
                        let packed = &qkv[(row * len + token) * sizes.packed()..];
                        for range in sizes.key_and_value(head) {
                            values[to].extend(&packed[range]);
                        }
                        given[to].push(Given { row, head, token });
                    }
                }
            }
        }
        let width = 2 + 2 * sizes.head_dim;
        let counts = |from: usize, row: usize| {
            let [ranked, recent] = spans(parts, reach, row, [from, own]);
            ranked.len().min(reach.ranked) + recent.len()
        };
        let received = (0..num_parts).map(|from| {
            let rows = (0..parts.batch).map(|row| counts(from, row));
            rows.sum::<usize>() * sizes.num_kv_heads
        });
        let received = received.collect::<Vec<_>>();
        let expected = received.iter().map(|count| count * width);
        let values = parts
            .links
            .exchange(values, &expected.collect::<Vec<_>>())
            .concat();

        // By row and head, from all parts in their order: positions rise in each part.
        let mut found = vec![Vec::new(); parts.batch * sizes.num_kv_heads];
        let mut place = 0;
        for from in 0..num_parts {
            for row in 0..parts.batch {
                for head in 0..sizes.num_kv_heads {
                    for _ in 0..counts(from, row) {
                        found[row * sizes.num_kv_heads + head].push(Found {
                            position: from * len + values[place * width] as usize,
                            rank: values[place * width + 1],
                            place,
                        });
                        place += 1;
                    }
                }
            }
        }
        for (index, found) in found.iter_mut().enumerate() {
            let (_, recent_from) = opening(parts, reach, index / sizes.num_kv_heads, own);
            let (mut best, recent): (Vec<_>, Vec<_>) =
                found.drain(..).partition(|key| key.position < recent_from);
            best.sort_by(|a, b| best_first((a.rank, a.position), (b.rank, b.position)));
            best.truncate(reach.ranked);
            best.sort_by_key(|key| key.position);
            found.extend(best.into_iter().chain(recent));
        }
        let slots = found.iter().map(Vec::len).max().unwrap_or(0);
        let mut border = Self {
            parts: parts.clone(),
            sizes,
            slots,
            pads: found
                .chunks(sizes.num_kv_heads)
                .map(|heads| slots - heads[0].len())
                .collect(),
            keys: Vec::new(),
            ranks: Vec::new(),
            positions: Vec::new(),
            places: Vec::new(),
            received,
            given,
        };
        for found in &found {
            let pads = slots - found.len();
            border.keys.extend(vec![0.0; pads * 2 * sizes.head_dim]);
            border.ranks.extend(vec![0.0; pads]);
            border.positions.extend(vec![None; pads]);
            border.places.extend(vec![None; pads]);
            for key in found {
                let at = key.place * width + 2;
                border.keys.extend(&values[at..at + 2 * sizes.head_dim]);
                border.ranks.push(key.rank);
                border.positions.push(Some(key.position));
                border.places.push(Some(key.place));
            }
        }
        border
    }

    /// Document bounds of the longer rows.
    pub(super) fn bounds(&self) -> [Vec<i32>; 2] {
        self.parts.bounds_behind(self.slots, &self.pads)
    }

    /// The packed tensor of the longer rows: the border's keys with queries of zero, then the part.
    pub(super) fn with_keys(&self, qkv: &[f32]) -> Vec<f32> {
        let (packed, len) = (self.sizes.packed(), self.parts.len());
        let width = self.sizes.head_dim;
        let mut all = Vec::with_capacity(self.parts.batch * (self.slots + len) * packed);
        for row in 0..self.parts.batch {
            let first = all.len();
            all.resize(first + self.slots * packed, 0.0);
            for head in 0..self.sizes.num_kv_heads {
                for slot in 0..self.slots {
                    let from = 2 * width * self.slot(row, head, slot);
                    let token = &mut all[first + slot * packed..];
                    for (part, range) in self.sizes.key_and_value(head).into_iter().enumerate() {
                        let from = from + part * width;
                        token[range].copy_from_slice(&self.keys[from..from + width]);
                    }
                }
            }
            all.extend(&qkv[row * len * packed..(row + 1) * len * packed]);
        }
        all
    }

    /// Ranks of the longer rows.
    pub(super) fn with_ranks(&self, ranks: &[f32]) -> Vec<f32> {
        let (len, slots) = (self.parts.len(), self.slots);
        let heads = ranks.chunks_exact(len).enumerate();
        heads
            .flat_map(|(head, own)| {
                let border = &self.ranks[head * slots..(head + 1) * slots];
                border.iter().chain(own).copied()
            })
            .collect()
    }

    /// From gradients of the longer rows, packed and of what each rank adds, those of this part's keys: each part gives
    /// back the gradients of its border to where the keys are from.
    pub(super) fn give_back(
        &self,
        d_qkv: &[f32],
        d_delta: Option<&[f32]>,
    ) -> (Vec<f32>, Option<Vec<f32>>) {
        let (packed, len, sizes) = (self.sizes.packed(), self.parts.len(), self.sizes);
        let row_len = self.slots + len;
        let width = 1 + 2 * sizes.head_dim;
        let mut back = vec![0.0; self.received.iter().sum::<usize>() * width];
        for row in 0..self.parts.batch {
            for head in 0..sizes.num_kv_heads {
                for slot in 0..self.slots {
                    let Some(place) = self.places[self.slot(row, head, slot)] else {
                        continue;
                    };
                    let to = &mut back[place * width..(place + 1) * width];
                    let delta = (row * sizes.num_kv_heads + head) * row_len + slot;
                    to[0] = d_delta.map_or(0.0, |d_delta| d_delta[delta]);
                    let token = &d_qkv[(row * row_len + slot) * packed..];
                    for (part, range) in sizes.key_and_value(head).into_iter().enumerate() {
                        let at = 1 + part * sizes.head_dim;
                        to[at..at + sizes.head_dim].copy_from_slice(&token[range]);
                    }
                }
            }
        }
        let mut rest = back.as_slice();
        let values = self.received.iter().map(|count| {
            let (values, others) = rest.split_at(count * width);
            rest = others;
            values.to_vec()
        });
        let counts = self.given.iter().map(|given| given.len() * width);
        let counts = counts.collect::<Vec<_>>();
        let values = self.parts.links.exchange(values.collect(), &counts);

        let rows = d_qkv.chunks_exact(row_len * packed);
        let mut own = rows
            .flat_map(|row| &row[self.slots * packed..])
            .copied()
            .collect::<Vec<_>>();
        let mut own_delta = d_delta.map(|d_delta| {
            let heads = d_delta.chunks_exact(row_len);
            heads
                .flat_map(|head| &head[self.slots..])
                .copied()
                .collect::<Vec<_>>()
        });
        for (given, values) in self.given.iter().zip(&values) {
            for (key, values) in given.iter().zip(values.chunks_exact(width)) {
                if let Some(own_delta) = &mut own_delta {
                    let delta = (key.row * sizes.num_kv_heads + key.head) * len + key.token;
                    own_delta[delta] += values[0];
                }
                let token = &mut own[(key.row * len + key.token) * packed..];
                let parts = values[1..].chunks_exact(sizes.head_dim);
                for (range, values) in sizes.key_and_value(key.head).into_iter().zip(parts) {
                    let sums = token[range].iter_mut().zip(values);
                    sums.for_each(|(sum, value)| *sum += value);
                }
            }
        }
        (own, own_delta)
    }

    fn slot(&self, row: usize, head: usize, slot: usize) -> usize {
        (row * self.sizes.num_kv_heads + head) * self.slots + slot
    }
}

/// Where the document begins that is open where part `to` begins, and from where on its keys are seen whatever their
/// rank.
fn opening(parts: &RowParts, reach: Reach, row: usize, to: usize) -> (usize, usize) {
    let first = to * parts.len();
    let [start, _] = parts.document(row, first);
    (start, start.max(first.saturating_sub(reach.recent)))
}

/// The keys of one part that another's queries may see for their rank, and those they may see for their position.
fn spans(parts: &RowParts, reach: Reach, row: usize, [from, to]: [usize; 2]) -> [Range<usize>; 2] {
    if from >= to {
        return [0..0, 0..0];
    }
    let (start, recent_from) = opening(parts, reach, row, to);
    let own = from * parts.len()..(from + 1) * parts.len();
    [start..recent_from, recent_from..to * parts.len()].map(|span| {
        let first = span.start.max(own.start);
        first..span.end.min(own.end).max(first)
    })
}
