//! Element types of tensors.

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// bfloat16.
    BF16,
    /// 32-bit integer.
    I32,
    /// 64-bit integer.
    I64,
    /// 8-bit unsigned integer; also holds fp8.
    U8,
    /// A type that no kernel takes: its name and size in bytes.
    Other(&'static str, usize),
}

impl DType {
    /// Size of an element in bytes.
    pub fn size(&self) -> usize {
        match self {
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
            Self::BF16 => 2,
            Self::U8 => 1,
            Self::Other(_, bytes) => *bytes,
        }
    }

    /// Name of the type in error messages.
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
