use sieve_testing::refusal;
use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::layout::Layout;
use super::*;

fn write_shard(dir: &Path, name: &str, vocab_size: usize, documents: &[Vec<u32>]) -> PathBuf {
    let prefix = dir.join(name);
    let mut writer = ShardWriter::create(&prefix, vocab_size).unwrap();
    for document in documents {
        writer.push(document).unwrap();
    }
    writer.finish().unwrap();
    prefix
}

/// Three documents, [1, 2, 3], [4], [5, 65499], as Megatron-LM's writer lays them out: magic bytes; from byte 9
/// version, 17 dtype, 18 number of sequences, 26 number of document boundaries; from 34 lengths of sequences, 46 their
/// first bytes in the `.bin` file, 70 document boundaries.
const GOLDEN_IDX: [u8; 34 + 12 + 24 + 32] = *b"\
MMIDIDX\0\0\
\x01\0\0\0\0\0\0\0\
\x08\
\x03\0\0\0\0\0\0\0\
\x04\0\0\0\0\0\0\0\
\x03\0\0\0\x01\0\0\0\x02\0\0\0\
\0\0\0\0\0\0\0\0\x06\0\0\0\0\0\0\0\x08\0\0\0\0\0\0\0\
\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0";
const GOLDEN_BIN: [u8; 12] = [1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 0xDB, 0xFF];

#[test]
fn the_bytes_are_megatrons() {
    let dir = tempfile::tempdir().unwrap();
    let documents = [vec![1, 2, 3], vec![4], vec![5, 65_499]];
    // 65499 needs a vocabulary of 65500, which is no longer u16 by Megatron's rule: write it by hand.
    let small = [vec![1, 2, 3], vec![4], vec![5, 65_498]];
    let prefix = write_shard(dir.path(), "v1.5", 65_499, &small);
    assert_eq!(fs::read(dir.path().join("v1.5.idx")).unwrap(), GOLDEN_IDX);
    assert_eq!(fs::read(dir.path().join("v1.5.bin")).unwrap()[..10], GOLDEN_BIN[..10]);
    fs::write(dir.path().join("v1.5.bin"), GOLDEN_BIN).unwrap();
    let reader = ShardReader::open(&prefix).unwrap();
    let counts = (reader.num_documents(), reader.num_tokens());
    assert_eq!((counts, reader.dtype()), ((3, 6), TokenDtype::U16));
    for (document, wanted) in documents.iter().enumerate() {
        assert_eq!(&reader.document(document as u64).unwrap(), wanted);
    }
}

#[test]
fn a_large_vocabulary_is_stored_in_four_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = write_shard(dir.path(), "big", 65_500, &[vec![65_499, 0], vec![7]]);
    let [bin, idx] = ["big.bin", "big.idx"].map(|name| fs::read(dir.path().join(name)).unwrap());
    assert_eq!(bin, [0xDB, 0xFF, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0]);
    assert_eq!(idx[17], 4);
    assert_eq!(idx[42..58], [0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(ShardReader::open(&prefix).unwrap().document(0).unwrap(), [65_499, 0]);
}

#[test]
fn documents_may_have_several_sequences() {
    let mut idx = GOLDEN_IDX[..70].to_vec();
    idx[26] = 3;
    for boundary in [0u64, 2, 3] {
        idx.extend(boundary.to_le_bytes());
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("s.idx"), idx).unwrap();
    fs::write(dir.path().join("s.bin"), GOLDEN_BIN).unwrap();
    let reader = ShardReader::open(&dir.path().join("s")).unwrap();
    assert_eq!(reader.document(0).unwrap(), [1, 2, 3, 4]);
    assert_eq!(reader.document(1).unwrap(), [5, 65_499]);
}

#[test]
fn an_empty_shard_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = write_shard(dir.path(), "none", 100, &[]);
    let reader = ShardReader::open(&prefix).unwrap();
    assert_eq!((reader.num_documents(), reader.num_tokens()), (0, 0));
}

#[test]
fn each_mistake_of_an_index_has_its_own_error() {
    type Change = dyn Fn(&mut Vec<u8>);
    let check = |change: &Change| {
        let mut idx = GOLDEN_IDX.to_vec();
        change(&mut idx);
        Layout::check(&idx, GOLDEN_BIN.len() as u64).unwrap_err()
    };
    let cases: [(&Change, &str); 14] = [
        (&|idx| idx.truncate(33), "33 bytes are fewer than the header's 34"),
        (&|idx| idx[0] = b'X', "does not begin with MMIDIDX"),
        (&|idx| idx[9] = 2, "version 2"),
        (&|idx| idx[17] = 5, "dtype code 5"),
        (&|idx| idx[17] = 4, "sequence 1 begins at byte 6, but the one before ends at 12"),
        (&|idx| idx[18] = 4, "102 bytes, but 4 sequences"),
        (&|idx| idx[25] = 0xFF, "more than can be"),
        (&|idx| idx.push(0), "103 bytes, but 3 sequences and 4 document boundaries take 102"),
        (&|idx| idx[37] = 0xFF, "sequence 0 has length"),
        (&|idx| idx[54] = 4, "sequence 1 begins at byte 4"),
        (&|idx| idx[70] = 1, "the first document begins at sequence 1"),
        (&|idx| idx[78] = 3, "document boundary 2 is 2, below"),
        (&|idx| idx[94] = 2, "the last document ends at sequence 2 of 3"),
        (&|idx| idx[42] = 3, "7 tokens of 2 bytes, but the .bin file has 12 bytes"),
    ];
    for (change, wanted) in cases {
        let error = check(change);
        assert!(error.contains(wanted), "{error:?} lacks {wanted:?}");
    }
    // No sequences and no document boundaries, though even an empty shard has one boundary.
    let idx = [&GOLDEN_IDX[..18], &[0; 16]].concat();
    assert!(Layout::check(&idx, 0).unwrap_err().contains("lacks document boundaries"));
}

#[test]
fn errors_name_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |name: &str, words: &str| refusal(ShardReader::open(&dir.path().join(name)), words);
    refused("missing", "missing.idx");
    fs::write(dir.path().join("a.idx"), GOLDEN_IDX).unwrap();
    refused("a", "a.bin");
    fs::write(dir.path().join("a.bin"), &GOLDEN_BIN[..11]).unwrap();
    refused("a", "a.idx: 6 tokens of 2 bytes, but the .bin file has 11 bytes");
    fs::create_dir(dir.path().join("b.idx")).unwrap();
    refused("b", "b.idx");
}

#[test]
fn tokens_outside_the_vocabulary_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("a");
    let mut writer = ShardWriter::create(&prefix, 10).unwrap();
    writer.push(&[1, 9]).unwrap();
    refusal(writer.push(&[3, 10]), "token 10 is outside the vocabulary of 10");
    writer.push(&[2]).unwrap();
    writer.finish().unwrap();
    let reader = ShardReader::open(&prefix).unwrap();
    assert_eq!(reader.num_documents(), 2);
    assert_eq!(reader.token_counts(10).unwrap(), [0, 1, 1, 0, 0, 0, 0, 0, 0, 1]);
    refusal(reader.token_counts(9), "document 0 holds token 9, outside a vocabulary of 9\n");

    // A negative id in an i32 shard.
    let prefix = write_shard(dir.path(), "n", 70_000, &[vec![1, 2]]);
    fs::write(dir.path().join("n.bin"), [1, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF]).unwrap();
    refusal(ShardReader::open(&prefix).unwrap().document(0), "holds token -1,");
}

#[test]
fn an_unfinished_shard_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = ShardWriter::create(&dir.path().join("a"), 10).unwrap();
    writer.push(&[1]).unwrap();
    drop(writer);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn what_is_written_is_read(
        vocab_size in prop_oneof![Just(300usize), Just(65_499), Just(65_500), Just(200_000)],
        seeds in proptest::collection::vec(proptest::collection::vec(any::<u32>(), 0..20), 0..12),
    ) {
        let documents = seeds.iter().map(|document| document.iter().map(|seed| seed % vocab_size as u32).collect());
        let documents = documents.collect::<Vec<Vec<u32>>>();
        let dir = tempfile::tempdir().unwrap();
        let reader = ShardReader::open(&write_shard(dir.path(), "a", vocab_size, &documents)).unwrap();
        prop_assert_eq!(reader.num_tokens(), documents.iter().map(|d| d.len() as u64).sum::<u64>());
        let read = (0..reader.num_documents()).map(|d| reader.document(d).unwrap()).collect::<Vec<_>>();
        let mut counts = vec![0u64; vocab_size];
        documents.iter().flatten().for_each(|&token| counts[token as usize] += 1);
        prop_assert_eq!(reader.token_counts(vocab_size).unwrap(), counts);
        prop_assert_eq!(read, documents);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]
    // Mutated indices are refused, or every document they name lies inside the .bin file.
    #[test]
    fn mutated_indices_never_lead_outside_the_bin_file(
        changes in proptest::collection::vec((0usize..102, prop_oneof![0u8..12, any::<u8>()]), 1..6),
        cut in prop_oneof![4 => Just(0usize), 1 => 0usize..102],
        bin_bytes in prop_oneof![4 => Just(12u64), 1 => 0u64..40],
    ) {
        let mut idx = GOLDEN_IDX.to_vec();
        for (position, value) in changes {
            idx[position] = value;
        }
        idx.truncate(102 - cut);
        if let Ok(layout) = Layout::check(&idx, bin_bytes) {
            for document in 0..layout.num_documents {
                let tokens = layout.document_tokens(&idx, document);
                prop_assert!(tokens.start <= tokens.end && tokens.end * layout.dtype.num_bytes() <= bin_bytes);
            }
        }
    }

    #[test]
    fn random_bytes_are_refused(idx in proptest::collection::vec(any::<u8>(), 0..120), bin_bytes: u64) {
        prop_assert!(Layout::check(&idx, bin_bytes).is_err());
    }
}
