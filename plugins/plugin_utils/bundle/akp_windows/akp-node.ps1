# Starts akp-node.cs, which lies beside this file, with the compiler of the .NET Framework: .\akp-node.ps1 apply BUNDLE
# PowerShell 5.1. A preview, never run on Windows.
param([Parameter(ValueFromRemainingArguments)][string[]] $Words)
Add-Type -TypeDefinition (Get-Content -Raw -Encoding UTF8 "$PSScriptRoot\akp-node.cs") -ReferencedAssemblies System.Web.Extensions
exit [AkpNode]::Main($Words)
