//! Documents of rows, and thread pools.

/// Start and end of the document of each token, `[batch, seq_len]`: one document per row.
pub fn whole_rows(batch: usize, seq_len: usize) -> (Vec<i32>, Vec<i32>) {
    (vec![0; batch * seq_len], vec![seq_len as i32; batch * seq_len])
}

/// A pool of `count` threads.
///
/// # Panics
/// When the system gives no threads.
pub fn threads(count: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new()
        .num_threads(count)
        .build()
        .expect("a small thread pool can be made")
}
