// zig's linker exports all that a library has, of the C library too: what another library then has twice.
__asm__(".section .drectve,\"yni\"\n.ascii \" -exclude-symbols:atexit\"\n.text");
