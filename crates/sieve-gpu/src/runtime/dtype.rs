//! Element types of tensors.

/// The type of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// Brain float of 16 bits.
    BF16,
    /// 32-bit integer.
    I32,
    /// 64-bit integer.
    I64,
    /// A byte.
    U8,
    /// A type that no kernel takes: its name and size in bytes.
    Other(&'static str, usize),
}

impl DType {
    /// Bytes of an element.
    pub fn size(&self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
            Self::BF16 => 2,
            Self::U8 => 1,
            Self::Other(_, bytes) => *bytes,
        }
    }

    /// The name in error messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::BF16 => "bf16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::U8 => "u8",
            Self::Other(name, _) => name,
        }
    }
}
