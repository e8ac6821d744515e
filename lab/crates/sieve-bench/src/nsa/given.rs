//! The blocks that checks give attention, made of those that the CPU chose.
use super::Inputs;

impl Inputs {
    /// Blocks that have one list: two where they come in pairs.
    fn per_list(&self) -> usize {
        if self.in_pairs { 2 } else { 1 }
    }

    /// Whether no query reads the token at `offset` of its document: every third block, or pair, is left out (1, 4, 7,
    /// ..).
    pub(super) fn is_unread(&self, offset: usize) -> bool {
        offset / (self.blocks.select_block_size * self.per_list()) % 3 == 1
    }

    /// Where the query of list number `list` stands in its document.
    fn position(&self, list: usize) -> usize {
        let token = list / self.case.shape.num_kv_heads;
        token % self.case.shape.seq_len - self.case.doc_start[token] as usize
    }

    /// Of the blocks of each query those that are read, or the pairs of these.
    pub(super) fn read_of(&self, blocks: &[i32]) -> Vec<i32> {
        let (count, size, per_list) =
            (self.blocks.num_selected_blocks, self.blocks.select_block_size as i32, self.per_list() as i32);
        let of_list = |(list, row): (usize, &[i32])| {
            let own = self.position(list) as i32 / size;
            let mut units: Vec<i32> = row.iter().filter(|&&block| block >= 0).map(|block| block / per_list).collect();
            units.dedup();
            units.retain(|unit| !self.is_unread((unit * per_list * size) as usize));
            let halves = |unit: i32| (unit * per_list..(unit + 1) * per_list).map(|x| if x > own { -1 } else { x });
            let mut all: Vec<i32> = units.into_iter().flat_map(halves).take(count).collect();
            all.resize(count, -1);
            all
        };
        blocks.chunks_exact(count).enumerate().flat_map(of_list).collect()
    }

    /// The local blocks of each query, and of `blocks` as many earlier ones as there is room for.
    pub(super) fn choice_with_local(&self, blocks: &[i32]) -> Vec<i32> {
        let (count, size) = (self.blocks.num_selected_blocks, self.blocks.select_block_size);
        let most_far = count - self.local.tokens() / size;
        let of_list = |(list, row): (usize, &[i32])| {
            let position = self.position(list);
            let first = (position / self.local.size + 1).saturating_sub(self.local.count) * self.local.size / size;
            let earlier = row.iter().copied().filter(|&block| (0..first as i32).contains(&block)).take(most_far);
            let mut all: Vec<i32> = earlier.chain(first as i32..=(position / size) as i32).collect();
            all.resize(count, -1);
            all
        };
        blocks.chunks_exact(count).enumerate().flat_map(of_list).collect()
    }
}
