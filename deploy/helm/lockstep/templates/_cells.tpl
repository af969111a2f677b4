{{/*
"lockstep.cells": JSON of the cells, each with the defaults merged in, checked, and with what is derived from it:
  prefix        what the names of its objects begin with
  trustDomain   in the names of its certificates
  pools         the InferencePools of its tokenizers: the name of each by its protocol
  modelDir      where its pods see the model
  anyHost       what pods listen on: every interface
  scheduler     its .discovery, chosen where it was `auto`
  workers       also .liveKind (what runs), .coupled, .domains, .ranks (of a domain), .ranksPerNode, .kind (what to render), .setPerDomain (a StatefulSet of each), .onGpu,
                .places (the most that a cell has which discovers them)
*/}}
{{- define "lockstep.cells" -}}
{{- include "lockstep.checkLabels" .Values.labels }}
{{- $cells := list }}
{{- $names := list }}
{{- range $own := .Values.cells }}
  {{- if has $own.name $names }}{{ fail (printf "cells: the name %q is used twice" $own.name) }}{{ end }}
  {{- $names = append $names $own.name }}
  {{- $cell := (include "lockstep.merged" (list $.Values.cellDefaults $own) | fromJson).v }}
  {{- include "lockstep.derive" (list $ $cell) }}
  {{- include "lockstep.check" (list $ $cell) }}
  {{- $cells = append $cells $cell }}
{{- end }}
{{- if not $cells }}{{ fail "cells: name at least one, such as cells[0].name=main" }}{{ end }}
{{- include "lockstep.checkPools" (list $ $cells) }}
{{- toJson $cells }}
{{- end }}

{{/* Adds to a cell what is derived from its values; prints nothing. */}}
{{- define "lockstep.derive" -}}
{{- $root := index . 0 }}{{ $cell := index . 1 }}{{ $workers := $cell.workers }}
{{- $_ := set $cell "prefix" (printf "%s-%s" (default $root.Release.Name $root.Values.fullnameOverride) $cell.name) }}
{{- $_ := set $cell "trustDomain" (printf "%s.%s" $cell.name $cell.tls.trustDomain) }}
{{- $_ := set $cell "modelDir" (include "lockstep.modelDir" $cell) }}
{{- $_ := set $cell "pools" (include "lockstep.pools" (list $root $cell) | fromJson) }}
{{- $_ := set $cell "anyHost" (ternary "[::]" "0.0.0.0" (has "IPv6" $root.Values.ipFamilies)) }}
{{- $coupled := and $workers.ep (gt (int $workers.dp) 1) }}
{{- range $part := list "tokenizer" "scheduler" "workers" }}{{ $_ := set (get $cell $part) "key" $part }}{{ end }}
{{- $ranks := mul (int $workers.tp) (ternary (int $workers.dp) 1 $coupled) | int }}
{{- $_ := set $workers "coupled" $coupled }}
{{- $_ := set $workers "domains" (ternary 1 (int $workers.dp) $coupled) }}
{{- $_ := set $workers "ranks" $ranks }}
{{- $_ := set $workers "ranksPerNode" (div $ranks (int $workers.nodes)) }}
{{- $_ := set $workers "onGpu" (not (and (empty $workers.gpu.resource) (empty $workers.gpu.deviceClass))) }}
{{- /* Steps of eight, so that one replica more changes no scheduler; always one to spare, for a pod that terminates. */}}
{{- $places := mul 8 (add 1 (div (int $workers.dp) 8)) | int }}
{{- $_ := set $workers "places" (ternary (int $workers.autoscaling.maxReplicas) $places $workers.autoscaling.enabled) }}
{{- if eq $cell.scheduler.discovery "auto" }}
  {{- $live := ternary "" (include "lockstep.liveDiscovery" (list $root $cell.prefix)) $coupled }}
  {{- if and $workers.autoscaling.enabled (eq $live "static") }}{{ $live = "" }}{{ end }}
  {{- $_ := set $cell.scheduler "discovery" (default (ternary "static" "dns" $coupled) $live) }}
{{- end }}
{{- $_ := set $workers "liveKind" (include "lockstep.liveKind" (list $root $cell.prefix)) }}
{{- if $workers.autoscaling.enabled }}
  {{- $_ := set $workers "kind" "Deployment" }}
{{- else if and (eq $workers.kind "auto") (has $workers.liveKind (list "LeaderWorkerSet" "StatefulSet" "StatefulSets")) }}
  {{- $_ := set $workers "kind" (trimSuffix "s" $workers.liveKind) }}
{{- else if eq $workers.kind "auto" }}
  {{- $hasSets := $root.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1" }}
  {{- $_ := set $workers "kind" (ternary "LeaderWorkerSet" "StatefulSet" $hasSets) }}
{{- end }}
{{- $_ := set $workers "setPerDomain" (and (eq $workers.kind "StatefulSet") (gt (int $workers.nodes) 1)) }}
{{- end }}
