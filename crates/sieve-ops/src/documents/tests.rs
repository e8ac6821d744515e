use super::Documents;
use crate::testing::host_ints;
use burn_flex::Flex;

#[test]
fn positions_restart_at_each_document() {
    let (start, end) = ([0, 0, 2, 3, 0, 0, 0, 0], [2, 2, 3, 4, 4, 4, 4, 4]);
    let documents = Documents::<Flex>::new(&start, &end, [2, 4], &Default::default());
    assert_eq!(host_ints(documents.positions), [0, 1, 0, 0, 0, 1, 2, 3]);
    assert_eq!(host_ints(documents.start), [0, 0, 2, 3, 0, 0, 0, 0]);
    assert_eq!(host_ints(documents.end), [2, 2, 3, 4, 4, 4, 4, 4]);
}

#[test]
fn a_row_may_be_one_document() {
    let documents = Documents::<Flex>::whole_rows([2, 3], &Default::default());
    assert_eq!(host_ints(documents.positions), [0, 1, 2, 0, 1, 2]);
    assert_eq!(host_ints(documents.end), [3; 6]);
}

#[test]
fn invalid_document_bounds_are_refused() {
    let new = |end: &[u32]| Documents::<Flex>::new(&[0, 0], end, [1, 2], &Default::default());
    sieve_testing::panics("token 1 is outside its document", || new(&[1, 1]));
    sieve_testing::panics("one end per token", || new(&[2]));
}
