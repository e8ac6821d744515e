//! The ranks that divide tensors among them.

/// The consecutive ranks that divide tensors among them, this rank one of them. The ranks of a run form one such group,
/// or several of equal size. Each group has all tensors, and is then called a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardGroup {
    rank: usize,
    num_ranks: usize,
    size: usize,
}

impl ShardGroup {
    /// The group of a process without others.
    pub const ALONE: Self = Self { rank: 0, num_ranks: 1, size: 1 };

    /// The group of a rank of `num_ranks`, if groups have `size` ranks. All ranks are one group where `size` is 0 or
    /// does not divide them.
    pub fn new(rank: usize, num_ranks: usize, size: usize) -> Self {
        let size = if size > 0 && num_ranks.is_multiple_of(size) { size } else { num_ranks };
        Self { rank, num_ranks, size }
    }

    /// Number of ranks of the group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// This rank's place in its group, from 0: the number of its piece.
    pub fn place(&self) -> usize {
        self.place_of(self.rank)
    }

    /// The place in its group of any rank.
    pub fn place_of(&self, rank: usize) -> usize {
        rank % self.size
    }

    /// The ranks of this group, in the order of their places.
    pub fn ranks(&self) -> std::ops::Range<usize> {
        let first = self.rank - self.place();
        first..first + self.size
    }

    /// The ranks with this one's place, one of each group: each holds the same pieces.
    pub fn alike(&self) -> impl Iterator<Item = usize> + use<> {
        (self.place()..self.num_ranks).step_by(self.size)
    }

    /// Number of groups.
    pub fn num_replicas(&self) -> usize {
        self.num_ranks / self.size
    }

    /// Whether this rank is of the first group, whose pieces are counted and saved.
    pub fn is_first(&self) -> bool {
        self.rank < self.size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_in_one_group_and_among_the_ranks_with_its_pieces() {
        for (size, groups) in [(0, 1), (2, 3), (3, 2), (6, 1), (1, 6), (4, 1)] {
            for rank in 0..6 {
                let group = ShardGroup::new(rank, 6, size);
                assert_eq!((group.size(), group.num_replicas()), (6 / groups, groups), "{size}");
                assert_eq!(group.ranks().nth(group.place()), Some(rank));
                assert_eq!(group.alike().position(|other| other == rank), Some(rank / group.size()));
                assert!(group.alike().all(|other| group.place_of(other) == group.place()));
                assert_eq!(group.is_first(), group.ranks().start == 0);
            }
        }
    }
}
