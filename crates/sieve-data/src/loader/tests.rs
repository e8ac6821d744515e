use proptest::prelude::*;
use sieve_testing::refusal;

use super::*;
use crate::mqar::{MqarConfig, MqarPart, MqarSplit};
use crate::permutation::Permutation;
use crate::prefetch::{Prefetch, PrefetchPlan};
use crate::shard::ShardWriter;

const VOCAB_SIZE: usize = 50_000;
const EOS: u32 = 0;
const PAD: u32 = 1;

/// A shard of documents with these lengths; token `t` of document `d` is `100 d + t + 2`, the last one `EOS`.
fn shard(lengths: &[usize]) -> (tempfile::TempDir, Arc<ShardReader>) {
    let dir = tempfile::tempdir().unwrap();
    let prefix = dir.path().join("s");
    let mut writer = ShardWriter::create(&prefix, VOCAB_SIZE).unwrap();
    for (document, &len) in lengths.iter().enumerate() {
        let mut tokens: Vec<u32> = (0..len).map(|token| (100 * document + token + 2) as u32).collect();
        if let Some(last) = tokens.last_mut() {
            *last = EOS;
        }
        writer.push(&tokens).unwrap();
    }
    writer.finish().unwrap();
    let reader = Arc::new(ShardReader::open(&prefix).unwrap());
    (dir, reader)
}

fn config(seq_len: usize, order: Order, packing: Packing) -> LoaderConfig {
    LoaderConfig { seq_len, order, packing, vocab_size: VOCAB_SIZE, pad_id: PAD }
}

/// A plan whose batches begin `stride` samples apart.
fn plan([first_sample, stride]: [u64; 2], batch: usize, num_batches: Option<u64>, depth: usize) -> PrefetchPlan {
    PrefetchPlan { first_sample, batch, stride, num_batches, depth }
}

/// Joins two batches, the second of which begins where the first ends.
fn join(mut left: Batch, right: Batch) -> Batch {
    let end = left.first_sample + left.batch as u64;
    assert_eq!((end, left.seq_len), (right.first_sample, right.seq_len));
    left.batch += right.batch;
    left.tokens.extend(right.tokens);
    left.labels.extend(right.labels);
    left.doc_start.extend(right.doc_start);
    left.doc_end.extend(right.doc_end);
    left.positions.extend(right.positions);
    left.documents.extend(right.documents);
    left
}

#[test]
fn a_packed_row_is_as_written_by_hand() {
    let (_dir, shard) = shard(&[3, 1, 4]);
    let loader = Loader::new(shard, config(5, Order::Sequential, Packing::Concatenated)).unwrap();
    assert_eq!(loader.samples_per_epoch(), 2);
    let batch = loader.batch(0, 2).unwrap();
    let wanted = Batch {
        first_sample: 0,
        batch: 2,
        seq_len: 5,
        tokens: vec![2, 3, 0, 0, 202, /* second row */ 203, 204, 0, 1, 1],
        labels: vec![3, 0, -100, -100, 203, 204, 0, -100, -100, -100],
        doc_start: vec![0, 0, 0, 3, 4, 0, 0, 0, 3, 3],
        doc_end: vec![3, 3, 3, 4, 5, 3, 3, 3, 5, 5],
        positions: vec![0, 1, 2, 0, 0, 0, 1, 2, 0, 1],
        documents: vec![0, 0, 0, 1, 2, 2, 2, 2, PAD_DOCUMENT, PAD_DOCUMENT],
    };
    assert_eq!(batch, wanted);
    assert_eq!(batch.num_labels(), 5);
}

/// Tokens without a label are padding and the EOS of each document.
#[test]
fn tokens_without_a_label_become_documents_of_one_token() {
    let (_dir, shard) = shard(&[3, 1, 4]);
    let loader = Loader::new(shard, config(5, Order::Sequential, Packing::Concatenated)).unwrap();
    let batch = loader.batch(0, 2).unwrap();
    let mut parted = batch.clone();
    parted.part_padding();
    assert_eq!(parted.doc_start, [0, 0, 2, 3, 4, 0, 0, 2, 3, 4]);
    assert_eq!(parted.doc_end, [2, 2, 3, 4, 5, 2, 2, 3, 4, 5]);
    assert_eq!(parted.positions, [0, 1, 0, 0, 0, 0, 1, 0, 0, 0]);
    let pad = PAD_DOCUMENT;
    assert_eq!(parted.documents, [0, 0, pad, pad, 2, 2, 2, pad, pad, pad]);
    assert_eq!((&parted.tokens, &parted.labels), (&batch.tokens, &batch.labels));
}

#[test]
fn one_document_per_row_is_as_written_by_hand() {
    let (_dir, shard) = shard(&[6, 1, 3]);
    let loader = Loader::new(shard, config(4, Order::Sequential, Packing::OneDocumentPerRow)).unwrap();
    assert_eq!(loader.samples_per_epoch(), 3);
    let batch = loader.batch(0, 3).unwrap();
    assert_eq!(batch.tokens, [2, 3, 4, 5, 6, 1, 1, 1, 202, 203, 1, 1]);
    assert_eq!(batch.labels, [3, 4, 5, 6, 0, -100, -100, -100, 203, 0, -100, -100]);
    assert_eq!(batch.doc_start, [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 2, 2]);
    assert_eq!(batch.doc_end, [4, 4, 4, 4, 1, 4, 4, 4, 2, 2, 4, 4]);
    assert_eq!(batch.positions, [0, 1, 2, 3, 0, 0, 1, 2, 0, 1, 0, 1]);
    let pad = PAD_DOCUMENT;
    assert_eq!(batch.documents, [0, 0, 0, 0, 0, pad, pad, pad, 2, 2, pad, pad]);
    let mut parted = batch.clone();
    parted.part_padding();
    assert_eq!(parted.doc_start, [0, 0, 0, 0, 0, 1, 2, 3, 0, 0, 2, 3]);
    assert_eq!(parted.doc_end, [4, 4, 4, 4, 1, 2, 3, 4, 2, 2, 3, 4]);
    assert_eq!(parted.positions, [0, 1, 2, 3, 0, 0, 0, 0, 0, 1, 0, 0]);
    assert_eq!((&parted.tokens, &parted.labels), (&batch.tokens, &batch.labels));
}

#[test]
fn settings_are_checked() {
    let (_dir, small) = shard(&[3, 4]);
    let shuffled = Order::Shuffled { seed: 1 };
    let of = |seq_len, order| Loader::new(Arc::clone(&small), config(seq_len, order, Packing::Concatenated));
    refusal(of(0, shuffled), "seq_len");
    refusal(of(8, shuffled), "7 tokens in 2 documents give no sample of seq_len 8");
    assert_eq!(of(7, shuffled).unwrap().samples_per_epoch(), 1);
    // A sequential loader pads the row instead.
    assert_eq!(of(8, Order::Sequential).unwrap().samples_per_epoch(), 1);
    let mut other = config(4, shuffled, Packing::Concatenated);
    other.pad_id = VOCAB_SIZE as u32;
    refusal(Loader::new(Arc::clone(&small), other), "pad_id");
    for (lengths, packing) in [(&[][..], Packing::Concatenated), (&[1, 1], Packing::OneDocumentPerRow)] {
        let (_dir, none) = shard(lengths);
        assert!(Loader::new(none, config(2, Order::Sequential, packing)).is_err());
    }
    (other.pad_id, other.vocab_size) = (PAD, 102);
    let loader = Loader::new(small, other).unwrap();
    refusal(loader.batch(0, 1), "document 1 | vocabulary of 102");
}

#[test]
fn prefetching_gives_the_same_batches_and_ends() {
    let (_dir, shard) = shard(&[30, 7, 12, 90, 4]);
    let loader = Loader::new(shard, config(8, Order::Shuffled { seed: 4 }, Packing::Concatenated)).unwrap();
    let loader = Arc::new(loader);
    let batches = Prefetch::new(Arc::clone(&loader), plan([5, 6], 2, Some(10), 3)).unwrap();
    let batches = batches.map(Result::unwrap);
    let wanted = (0..10).map(|number| loader.batch(5 + 6 * number, 2).unwrap());
    let wanted = wanted.collect::<Vec<_>>();
    assert_eq!(batches.collect::<Vec<_>>(), wanted);

    // If dropped while its thread waits for room, the prefetch ends: the loader has one owner again.
    let mut endless = Prefetch::new(Arc::clone(&loader), plan([5, 6], 2, None, 3)).unwrap();
    assert_eq!(endless.next().unwrap().unwrap(), wanted[0]);
    drop(endless);
    assert_eq!(Arc::strong_count(&loader), 1);
}

#[test]
fn prefetching_gives_an_error_once() {
    let (_dir, shard) = shard(&[3, 4]);
    let small = LoaderConfig { vocab_size: 50, ..config(7, Order::Sequential, Packing::Concatenated) };
    let loader = Arc::new(Loader::new(shard, small).unwrap());
    let mut batches = Prefetch::new(loader, plan([0, 1], 1, None, 2)).unwrap();
    assert!(batches.next().unwrap().is_err());
    assert!(batches.next().is_none());
    assert!(batches.next().is_none());
}

/// The expected row as (document, index of the token in it), computed from the whole token stream of an epoch.
fn brute_force_row(lengths: &[usize], config: LoaderConfig, sample: u64) -> Vec<Option<(usize, usize)>> {
    let num_documents = lengths.len() as u64;
    let order = |epoch| match config.order {
        Order::Sequential => (0..lengths.len()).collect::<Vec<_>>(),
        Order::Shuffled { seed } => {
            let permutation = Permutation::new(num_documents, seed, epoch);
            let places = 0..num_documents;
            places.map(|place| permutation.get(place) as usize).collect()
        }
    };
    let rows_of_epoch = |epoch| {
        let mut rows: Vec<Vec<(usize, usize)>> = Vec::new();
        match config.packing {
            Packing::Concatenated => {
                let tokens = |d: usize| (0..lengths[d]).map(move |token| (d, token));
                let mut stream = order(epoch).into_iter().flat_map(tokens).collect::<Vec<_>>();
                match config.order {
                    Order::Shuffled { .. } => stream.truncate(stream.len() / config.seq_len * config.seq_len),
                    // The stream's last token has no label and gets no row of its own.
                    Order::Sequential if stream.len() % config.seq_len == 1 % config.seq_len => {
                        stream.pop();
                    }
                    Order::Sequential => {}
                }
                rows.extend(stream.chunks(config.seq_len).map(<[_]>::to_vec));
            }
            Packing::OneDocumentPerRow => {
                for d in order(epoch) {
                    let tokens = 0..lengths[d].saturating_sub(1);
                    let tokens = tokens.map(|token| (d, token)).collect::<Vec<_>>();
                    rows.extend(tokens.chunks(config.seq_len).map(<[_]>::to_vec));
                }
            }
        }
        match config.order {
            Order::Sequential => rows,
            Order::Shuffled { seed } => {
                // The number is `ROW_ORDER_SALT` of the epoch's order of rows.
                let order = Permutation::new(rows.len() as u64, seed ^ 0x726F_775F_6F72_6465, epoch);
                let places = 0..rows.len() as u64;
                places.map(|row| rows[order.get(row) as usize].clone()).collect()
            }
        }
    };
    let mut before = 0;
    for epoch in 0.. {
        let rows = rows_of_epoch(epoch);
        if sample < before + rows.len() as u64 {
            let row = rows[(sample - before) as usize].iter();
            let mut row = row.copied().map(Some).collect::<Vec<_>>();
            row.resize(config.seq_len, None);
            return row;
        }
        before += rows.len() as u64;
    }
    unreachable!()
}

fn any_config() -> impl Strategy<Value = LoaderConfig> {
    let order = prop_oneof![any::<u64>().prop_map(|seed| Order::Shuffled { seed }), Just(Order::Sequential)];
    let packing = prop_oneof![Just(Packing::Concatenated), Just(Packing::OneDocumentPerRow)];
    (1usize..20, order, packing).prop_map(|(seq_len, order, packing)| config(seq_len, order, packing))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn rows_are_what_brute_force_says(
        lengths in proptest::collection::vec(0usize..40, 1..12),
        config in any_config(),
        first_sample in 0u64..60,
        count in 1usize..8,
    ) {
        let (_dir, shard) = shard(&lengths);
        let Ok(loader) = Loader::new(shard, config) else { return Ok(()) };
        let batch = loader.batch(first_sample, count).unwrap();
        for row in 0..count {
            let wanted = brute_force_row(&lengths, config, first_sample + row as u64);
            for column in 0..config.seq_len {
                let at = row * config.seq_len + column;
                let id = |document: usize, token: usize| {
                    if token + 1 == lengths[document] { EOS } else { (100 * document + token + 2) as u32 }
                };
                let (token, label, document) = match wanted[column] {
                    None => (PAD, IGNORE_LABEL, PAD_DOCUMENT),
                    Some((document, token)) => {
                        let last = token + 1 == lengths[document];
                        let label = if last { IGNORE_LABEL } else { id(document, token + 1) as i32 };
                        (id(document, token), label, document as u32)
                    }
                };
                prop_assert_eq!(
                    (batch.tokens[at], batch.labels[at], batch.documents[at]), (token, label, document),
                    "row {} column {}", row, column
                );
                // A document's part of the row: the longest run of equal document ids around this column.
                let document = |column: usize| wanted[column].map(|(d, _)| d);
                let same = |column: &usize| document(*column) == document(at % config.seq_len);
                let start = (0..=column).rev().take_while(same).last().unwrap();
                let end = (column..config.seq_len).take_while(same).last().unwrap() + 1;
                prop_assert_eq!((batch.doc_start[at], batch.doc_end[at]), (start as u32, end as u32));
                prop_assert_eq!(batch.positions[at], (column - start) as u32);
            }
        }
    }

    /// Each epoch has every token once, except the few that fill no row.
    #[test]
    fn an_epoch_is_every_token_once(lengths in proptest::collection::vec(1usize..40, 1..12), config in any_config()) {
        let (_dir, shard) = shard(&lengths);
        let Ok(loader) = Loader::new(shard, config) else { return Ok(()) };
        let num_samples = loader.samples_per_epoch();
        for epoch in 0..3 {
            let batch = loader.batch(epoch * num_samples, num_samples as usize).unwrap();
            let mut seen = vec![0usize; lengths.len()];
            batch.documents.iter().filter(|&&d| d != PAD_DOCUMENT).for_each(|&d| seen[d as usize] += 1);
            let num_labels = lengths.iter().map(|len| len - 1).sum::<usize>();
            match (config.packing, config.order) {
                (Packing::Concatenated, Order::Shuffled { .. }) => {
                    let missing = lengths.iter().zip(&seen).map(|(len, seen)| len - seen).sum::<usize>();
                    prop_assert!(missing < config.seq_len);
                }
                _ => prop_assert_eq!(batch.num_labels(), num_labels),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    /// Several ranks together read the same rows in the same order as one process.
    #[test]
    fn ranks_read_the_rows_of_one_process_in_its_order(
        sources in proptest::collection::vec((proptest::collection::vec(0usize..40, 1..12), 1usize..5), 1..4),
        is_mqar in prop::bool::weighted(0.1),
        config in any_config(),
        first_sample in 0u64..200,
        size in 1usize..9,
        batch in 1usize..4,
        micro_batches in 1usize..7,
    ) {
        let shards = sources.iter().map(|(lengths, _)| shard(lengths)).collect::<Vec<_>>();
        let weighted = shards.iter().zip(&sources);
        let weighted = weighted.map(|((_, shard), (_, weight))| (Arc::clone(shard), *weight as f64)).collect();
        let loader = match (is_mqar, &shards[..]) {
            (true, _) => Ok(mqar_loader()),
            (false, [(_, shard)]) => Loader::new(Arc::clone(shard), config),
            _ => Loader::mixture(weighted, config),
        };
        let Ok(loader) = loader else { return Ok(()) };
        let rounds = 0..micro_batches as u64;
        let read = rounds.flat_map(|round| (0..size).map(move |rank| (round, rank))).map(|(round, rank)| {
            let plan = PrefetchPlan::of_rank(first_sample, batch, [rank, size], 1);
            loader.batch(plan.first_sample + round * plan.stride, plan.batch).unwrap()
        });
        let read = read.collect::<Vec<_>>();
        let num_rows = micro_batches * size * batch;
        let whole = loader.batch(first_sample, num_rows).unwrap();
        let labels = read.iter().map(Batch::num_labels).sum::<usize>();
        prop_assert_eq!(labels, whole.num_labels());
        prop_assert_eq!(read.into_iter().reduce(join).unwrap(), whole);
    }
}

/// Validation reads evenly spread rows, or all rows of a small text.
#[test]
fn a_sample_of_the_rows_is_spread_evenly() {
    let lengths = vec![37usize; 30];
    let (_dir, shard) = shard(&lengths);
    let loader = Loader::new(shard, config(10, Order::Sequential, Packing::Concatenated)).unwrap();
    let all = loader.samples_per_epoch();
    // 1110 tokens in rows of 10.
    assert_eq!(all, 111);
    let most = u64::MAX;
    for (num_tokens, count) in [(0, 1), (1, 1), (10, 1), (11, 2), (500, 50), (1110, 111), (most, 111)] {
        let samples = loader.spread_samples(num_tokens);
        assert_eq!(samples.len(), count, "{num_tokens} tokens");
        assert!(samples[0] == 0 && samples.is_sorted_by(|a, b| a < b) && samples[count - 1] < all);
        let gaps = samples.windows(2).map(|pair| pair[1] - pair[0]);
        let (least, most) = (gaps.clone().min().unwrap_or(0), gaps.max().unwrap_or(0));
        assert!(most - least <= 1, "{samples:?}");
    }
    let samples = loader.spread_samples(70);
    let whole = loader.batch_of(&samples).unwrap();
    assert_eq!((whole.first_sample, whole.batch), (0, 7));
    for (row, &sample) in samples.iter().enumerate() {
        let alone = loader.batch(sample, 1).unwrap();
        assert_eq!(whole.tokens[10 * row..10 * (row + 1)], alone.tokens);
        assert_eq!(whole.doc_end[10 * row..10 * (row + 1)], alone.doc_end);
    }
    let task = mqar_loader();
    let rows = [4, 1].map(|sample| task.batch(sample, 1).unwrap().tokens);
    assert_eq!(task.batch_of(&[4, 1]).unwrap().tokens, rows.concat());
}

/// One long document must not fill a batch: its rows are spread over the epoch.
#[test]
fn neighbouring_samples_come_from_many_documents() {
    let lengths = vec![400usize; 10];
    let (_dir, shard) = shard(&lengths);
    let config = config(20, Order::Shuffled { seed: 3 }, Packing::Concatenated);
    let batch = Loader::new(shard, config).unwrap().batch(0, 16).unwrap();
    let mut documents: Vec<u32> = batch.documents.clone();
    documents.sort_unstable();
    documents.dedup();
    assert!(documents.len() >= 6, "{documents:?}");
}

const SHUFFLED: Order = Order::Shuffled { seed: 7 };

/// Two sources at 3 to 1: each row is the row that the source alone gives, and shares hold over every prefix.
#[test]
fn a_mixture_is_rows_of_its_sources_in_their_shares() {
    let shards = [shard(&[9; 40]), shard(&[5; 7])];
    let config = config(6, SHUFFLED, Packing::Concatenated);
    let alone = [0, 1].map(|source| Loader::new(Arc::clone(&shards[source].1), config).unwrap());
    let sources = vec![(Arc::clone(&shards[0].1), 0.75), (Arc::clone(&shards[1].1), 0.25)];
    let mixture = Loader::mixture(sources, config).unwrap();
    let both = alone.each_ref().map(Loader::samples_per_epoch);
    assert_eq!(mixture.samples_per_epoch(), both[0] + both[1]);
    let Rows::Mixture { schedule, .. } = &mixture.rows else {
        panic!("it mixes two shards");
    };
    let mut given = [0u64; 2];
    for sample in 0..200 {
        let source = schedule.get(sample).0;
        let row = mixture.batch(sample, 1).unwrap();
        let wanted = alone[source].batch(given[source], 1).unwrap();
        assert_eq!((row.tokens, row.labels), (wanted.tokens, wanted.labels));
        given[source] += 1;
        let share = 0.75 * (sample + 1) as f64;
        assert!((given[0] as f64 - share).abs() < 1.0, "{given:?}");
    }
    // The smaller source is in its ninth epoch by now; a batch does not depend on the batches before it.
    let whole = mixture.batch(0, 200).unwrap();
    let parts = [(0, 64), (64, 1), (65, 135)].map(|(first, count)| mixture.batch(first, count).unwrap());
    assert_eq!(parts.into_iter().reduce(join).unwrap(), whole);
}

#[test]
fn a_mixture_with_bad_weights_or_sequential_order_is_refused() {
    let (_dir, shard) = shard(&[9; 40]);
    for (weights, order, words) in [
        (&[1.0, 0.0][..], SHUFFLED, "not a positive number"),
        (&[], SHUFFLED, "0 sources"),
        (&[1.0], Order::Sequential, "no end"),
    ] {
        let sources = weights.iter().map(|&weight| (Arc::clone(&shard), weight)).collect();
        refusal(Loader::mixture(sources, config(6, order, Packing::Concatenated)), words);
    }
}

/// A mixture of one MQAR task in rows of 128 tokens, and a loader's settings for it.
fn mqar() -> (MqarMixture, LoaderConfig) {
    let part = MqarPart { config: MqarConfig::new(64, 4, 1), num_samples: 10 };
    let mixture = MqarMixture::shuffled(&[part], MqarSplit::Train, 128, 3).unwrap();
    let settings = LoaderConfig { vocab_size: 8192, ..config(128, SHUFFLED, Packing::Concatenated) };
    (mixture, settings)
}

fn mqar_loader() -> Loader {
    let (mixture, settings) = mqar();
    Loader::mqar(mixture, settings).unwrap()
}

#[test]
fn an_mqar_loader_gives_the_mixture_and_prefetches() {
    let (mixture, settings) = mqar();
    let loader = Arc::new(mqar_loader());
    assert_eq!(loader.batch(3, 4).unwrap(), mixture.batch(3, 4, PAD));
    let made = Prefetch::new(Arc::clone(&loader), plan([0, 2], 2, Some(3), 2)).unwrap();
    let made = made.map(Result::unwrap);
    assert_eq!(made.reduce(join).unwrap(), loader.batch(0, 6).unwrap());
    let short = config(64, SHUFFLED, Packing::Concatenated);
    refusal(Loader::mqar(mixture.clone(), short), "seq_len: 64");
    let few = LoaderConfig { vocab_size: 100, ..settings };
    refusal(Loader::mqar(mixture, few), "vocab_size: 100");
}
