//! Which kernels ran, and for how long: a record of every kernel of the process, read from CUPTI.
//!
//! CUPTI is NVIDIA's tracing library and comes with the CUDA toolkit. It sees Burn's kernels, cuBLASLt's and ours
//! alike, times them on the GPU and costs the host about a microsecond a launch.
use crate::locked::lock;
use cudarc::cupti::result::{CuptiError, activity};
use cudarc::cupti::sys::{
    self, CUpti_Activity, CUpti_ActivityKernel9, CUpti_ActivityKind, CUpti_ActivityMemcpy5, CUpti_ActivityMemset4,
};
use sieve_gpu::KernelError;
use std::alloc::{Layout, alloc, dealloc};
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::ptr::addr_of;
use std::sync::Mutex;

/// Bytes of one buffer that CUPTI fills: some 30,000 records.
const BUFFER_BYTES: usize = 8 << 20;
const BUFFER_ALIGN: usize = 8;
/// CUPTI's flag to hand out buffers that are not full, too.
const FLUSH_FORCED: u32 = 1;
/// What CUPTI traces: kernels, and the copies and fills that go through the driver.
const KINDS: [CUpti_ActivityKind; 3] = [
    CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
    CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_MEMCPY,
    CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_MEMSET,
];

/// One kernel, copy or fill that the GPU ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelRecord {
    /// The kernel's entry point, or `memcpy` or `memset`.
    pub name: String,
    /// Start on the GPU, in ns of CUPTI's clock.
    pub start_ns: u64,
    /// End in nanoseconds on the same clock.
    pub end_ns: u64,
}

/// All launches of one kernel in a trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelTotal {
    /// Name of the kernel's entry point.
    pub name: String,
    /// Number of launches.
    pub count: usize,
    /// Sum of the launches' times on the GPU, ns.
    pub total_ns: u64,
}

/// A trace of GPU work that is being recorded.
#[derive(Debug)]
pub struct KernelTrace(());

/// The GPU work that a finished trace recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TraceResult {
    /// Every kernel, copy and fill, by start.
    pub records: Vec<KernelRecord>,
}

// Process-wide, because CUPTI's callbacks have no argument for state.
static RECORDS: Mutex<Vec<KernelRecord>> = Mutex::new(Vec::new());

impl KernelTrace {
    /// Starts to record. Call it once the device has been used and is idle.
    ///
    /// # Errors
    /// [`KernelError::Installation`] where the library is missing or refuses (another profiler has it, or a container
    /// forbids it).
    pub fn start() -> Result<Self, KernelError> {
        // SAFETY: only tries to open the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(no_cupti("libcupti.so cannot be loaded"));
        }
        lock(&RECORDS).clear();
        activity::register_callbacks(Some(buffer_requested), Some(buffer_completed)).map_err(refused)?;
        for kind in KINDS {
            activity::enable(kind).map_err(refused)?;
        }
        Ok(Self(()))
    }

    /// Stops and returns the records. Wait for the GPU first: kernels that still run are not among them.
    ///
    /// # Errors
    /// [`KernelError::Installation`] when CUPTI cannot hand out its records.
    pub fn finish(self) -> Result<TraceResult, KernelError> {
        activity::flush_all(FLUSH_FORCED).map_err(refused)?;
        for kind in KINDS {
            activity::disable(kind).map_err(refused)?;
        }
        Ok(TraceResult::new(std::mem::take(&mut *lock(&RECORDS))))
    }
}

impl TraceResult {
    /// Sorts the records by start, and drops records that CUPTI could not time: they start at 0.
    fn new(mut records: Vec<KernelRecord>) -> Self {
        records.retain(|record| record.start_ns > 0);
        records.sort_by_key(|record| (record.start_ns, record.end_ns));
        Self { records }
    }

    /// Launches and time of each kernel, the longest total first.
    pub fn totals(&self) -> Vec<KernelTotal> {
        let mut by_name = BTreeMap::<&str, (usize, u64)>::new();
        for record in &self.records {
            let (count, total) = by_name.entry(&record.name).or_default();
            *count += 1;
            *total += record.end_ns - record.start_ns;
        }
        let mut totals: Vec<KernelTotal> = by_name
            .into_iter()
            .map(|(name, (count, total_ns))| KernelTotal { name: name.to_owned(), count, total_ns })
            .collect();
        totals.sort_by_key(|total| std::cmp::Reverse(total.total_ns));
        totals
    }

    /// Gaps in which nothing ran, summed by the kernel that started after the gap, the longest total first.
    pub fn idle_before(&self) -> Vec<KernelTotal> {
        let mut gaps = Vec::new();
        let mut last_end = self.records.first().map_or(0, |first| first.start_ns);
        for record in &self.records {
            if record.start_ns > last_end {
                gaps.push(KernelRecord { name: record.name.clone(), start_ns: last_end, end_ns: record.start_ns });
            }
            last_end = last_end.max(record.end_ns);
        }
        Self { records: gaps }.totals()
    }

    /// Time in which at least one kernel ran, ns.
    pub fn busy_ns(&self) -> u64 {
        let (mut busy, mut last_end) = (0, 0);
        for record in &self.records {
            busy += record.end_ns.saturating_sub(record.start_ns.max(last_end));
            last_end = last_end.max(record.end_ns);
        }
        busy
    }

    /// Nanoseconds from the first start to the last end.
    pub fn span_ns(&self) -> u64 {
        let start = self.records.iter().map(|record| record.start_ns).min();
        let end = self.records.iter().map(|record| record.end_ns).max();
        end.zip(start).map_or(0, |(end, start)| end - start)
    }
}

fn refused(error: CuptiError) -> KernelError {
    let text = error.error_string().ok().map(CStr::to_string_lossy);
    no_cupti(&text.map_or_else(|| format!("{error:?}"), |text| text.into_owned()))
}

fn no_cupti(reason: &str) -> KernelError {
    KernelError::Installation(format!(
        "kernels cannot be traced: {reason}\n  hint: install the CUDA toolkit, or `pip install nvidia-cuda-cupti`, put \
         the folder of libcupti.so on LD_LIBRARY_PATH, and run no other profiler"
    ))
}

fn buffer_layout() -> Layout {
    Layout::from_size_align(BUFFER_BYTES, BUFFER_ALIGN).expect("a power of two")
}

/// CUPTI's callback for a new buffer. A `max_records` of 0 means as many as fit.
extern "C" fn buffer_requested(buffer: *mut *mut u8, size: *mut usize, max_records: *mut usize) {
    // SAFETY: CUPTI passes three valid pointers; the memory is freed in buffer_completed.
    unsafe {
        *buffer = alloc(buffer_layout());
        *size = if (*buffer).is_null() { 0 } else { BUFFER_BYTES };
        *max_records = 0;
    }
}

/// CUPTI's callback for a buffer with records: keeps them and frees the buffer.
extern "C" fn buffer_completed(
    _context: cudarc::driver::sys::CUcontext,
    _stream: u32,
    buffer: *mut u8,
    _size: usize,
    valid_bytes: usize,
) {
    if buffer.is_null() {
        return;
    }
    let mut record: *mut CUpti_Activity = std::ptr::null_mut();
    // SAFETY: the buffer holds `valid_bytes` of records; the call returns an error after the last one.
    while unsafe { activity::get_next_record(buffer, valid_bytes, &mut record) }.is_ok() {
        // SAFETY: the record is one of the kinds enabled above or is skipped.
        lock(&RECORDS).extend(unsafe { read_record(record) });
    }
    // SAFETY: allocated in buffer_requested with this layout.
    unsafe { dealloc(buffer, buffer_layout()) };
}

/// The record of a kernel, copy or fill; `None` for another kind.
///
/// # Safety
/// `record` points to a CUPTI activity record. The members read have the same offset in every version of their record.
unsafe fn read_record(record: *const CUpti_Activity) -> Option<KernelRecord> {
    // Each kind's record has `start` and `end` at its own offset. Members are packed, so they are copied out unaligned.
    macro_rules! times {
        ($kind:ty) => {{
            let typed: *const $kind = record.cast();
            [addr_of!((*typed).start).read_unaligned(), addr_of!((*typed).end).read_unaligned()]
        }};
    }
    // SAFETY: by the caller's promise.
    let (name, [start_ns, end_ns]) = unsafe {
        match addr_of!((*record).kind).read_unaligned() {
            CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL => {
                let kernel: *const CUpti_ActivityKernel9 = record.cast();
                let name = addr_of!((*kernel).name).read_unaligned();
                let name = if name.is_null() { "unknown".into() } else { CStr::from_ptr(name).to_string_lossy() };
                (name, times!(CUpti_ActivityKernel9))
            }
            CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_MEMCPY => ("memcpy".into(), times!(CUpti_ActivityMemcpy5)),
            CUpti_ActivityKind::CUPTI_ACTIVITY_KIND_MEMSET => ("memset".into(), times!(CUpti_ActivityMemset4)),
            _ => return None,
        }
    };
    Some(KernelRecord { name: name.into_owned(), start_ns, end_ns })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str, start_ns: u64, end_ns: u64) -> KernelRecord {
        let name = name.to_owned();
        KernelRecord { name, start_ns, end_ns }
    }

    #[test]
    fn the_time_of_overlapping_kernels_counts_once() {
        let result = TraceResult::new(vec![
            record("a", 30, 31),
            record("a", 10, 20),
            record("b", 15, 18),
            // CUPTI could not time it.
            record("b", 0, 0),
        ]);
        assert_eq!(result.busy_ns(), 11);
        assert_eq!(result.span_ns(), 21);
        let totals = result.totals();
        let names: Vec<_> = totals.iter().map(|total| (total.name.as_str(), total.count, total.total_ns)).collect();
        assert_eq!(names, [("a", 2, 11), ("b", 1, 3)]);
        let gaps = result.idle_before();
        assert_eq!((gaps.len(), gaps[0].count, gaps[0].total_ns), (1, 1, 10));
        assert_eq!(gaps[0].name, "a");
    }

    #[test]
    fn an_empty_trace_has_no_span() {
        assert_eq!(TraceResult::default().span_ns(), 0);
        assert_eq!(TraceResult::default().busy_ns(), 0);
    }
}
