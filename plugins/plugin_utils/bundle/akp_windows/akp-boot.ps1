# Has Windows restore the last bundle when it starts: .\akp-boot.ps1, and .\akp-boot.ps1 -Remove for the opposite.
# PowerShell 5.1. A preview, never run on Windows.
param([switch] $Remove)
$ErrorActionPreference = 'Stop'
$name = 'akp-restore'
Get-ScheduledTask -TaskName $name -ErrorAction SilentlyContinue | Unregister-ScheduledTask -Confirm:$false
if (-not $Remove) {
    $state = Join-Path $env:ProgramData 'akp'
    # SYSTEM will start what lies there: refuse a directory that others own or may write. A task that was registered before is gone by now.
    Add-Type -TypeDefinition (Get-Content -Raw -Encoding UTF8 "$PSScriptRoot\akp-node.cs") -ReferencedAssemblies System.Web.Extensions
    [StateDirectory]::Secure($state)
    $program = Join-Path $state 'akp-node.ps1'
    $arguments = "-NoProfile -NonInteractive -ExecutionPolicy Bypass -File `"$program`" restore 600"
    $action = New-ScheduledTaskAction -Execute 'powershell.exe' -Argument $arguments
    $trigger = New-ScheduledTaskTrigger -AtStartup
    Register-ScheduledTask -TaskName $name -Action $action -Trigger $trigger -User 'SYSTEM' -RunLevel Highest | Out-Null
}
Write-Output '{"ok":true}'
