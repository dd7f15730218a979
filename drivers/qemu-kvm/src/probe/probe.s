# The KVM probe guest: the last 256 bytes of a 64 KiB firmware image. Enters 32-bit protected mode, counts down from
# 0x02000000, and writes 0x2a to QEMU's debug exit at port 0xf4.
# Build: as --32 -o probe.o probe.s && ld -m elf_i386 --oformat binary -Ttext 0xffffff00 -o probe.bin probe.o
	.code16
	.globl _start
_start:
	cli
	lgdtl	%cs:(gdtr - _start + 0xff00)
	movl	%cr0, %eax
	orb	$1, %al
	movl	%eax, %cr0
	ljmpl	$8, $protected
	.code32
protected:
	movl	$0x02000000, %ecx
1:	decl	%ecx
	jnz	1b
	movb	$0x2a, %al
	outb	%al, $0xf4
2:	hlt
	jmp	2b
	.balign	8
gdt:	.quad	0
	.quad	0x00cf9a000000ffff
gdtr:	.word	15
	.long	gdt
	# The reset vector, 16 bytes below 4 GiB.
	.org	0xf0
	.code16
	jmp	_start
	.org	0x100, 0xf4
