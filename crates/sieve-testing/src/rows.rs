//! Rows that are one document, and thread pools.

/// First token and end of each token's document, both `[batch, seq_len]`, where each row is one document.
pub fn whole_rows(batch: usize, seq_len: usize) -> (Vec<i32>, Vec<i32>) {
    (vec![0; batch * seq_len], vec![seq_len as i32; batch * seq_len])
}

/// A pool of `count` threads.
///
/// # Panics
/// When the system gives no threads.
pub fn threads(count: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(count).build().expect("a small thread pool can be made")
}
